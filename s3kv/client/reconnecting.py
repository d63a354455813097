"""A client whose connection to the agent is made again after it broke.

Invariants kept here:
- A call that has to connect again first gets no more time for that than `agent.call_timeout_s`; in a pause after
  trouble no call asks the agent at all.
- What is told of slots and leases reaches the run of the agent that gave them, or none.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from s3kv.client.connection import Connection
from s3kv.client.launch import connect_or_start
from s3kv.client.protocol import (
    Abandon,
    Attach,
    Attached,
    Commit,
    Finished,
    Message,
    Release,
    Reply,
    unpack_u32,
)
from s3kv.client.stats import ClientStats
from s3kv.errors import AgentTimeout, AgentUnavailable, ConfigError, ProtocolError
from s3kv.identity import NamespaceSpec
from s3kv.settings import Settings

MAX_PAUSE_FACTOR = 32
"""How many times `agent.reconnect_s` the pause after repeated trouble may grow to."""

MAX_UNTOLD = 1024
"""Messages kept for an agent while the connection to it is broken; the oldest give way."""

R = TypeVar("R", bound=Message)
Told = Release | Commit | Abandon | Finished


class ReconnectingClient:
    """A connection that is made again, at most once in `agent.reconnect_s`, after it broke."""

    def __init__(
        self,
        settings: Settings,
        namespace: NamespaceSpec,
        *,
        role: str,
        rank: int,
        ranks: int,
        engine_id: str,
        clock: Callable[[], float],
    ) -> None:
        self.stats = ClientStats()
        self._settings = settings
        self._namespace = namespace
        self._role = role
        self._rank = rank
        self._ranks = ranks
        self._engine_id = engine_id
        self._clock = clock
        self._call_timeout_s = settings.agent.call_timeout_s
        self._lock = threading.Lock()  # guards the three below
        self._connection: Connection | None = None
        self._ns = 0
        self._untold: deque[tuple[int, Told]] = deque(maxlen=MAX_UNTOLD)  # with the epoch it is meant for
        self._next_try = float("-inf")
        self._pause_s = settings.agent.reconnect_s

    @property
    def epoch(self) -> int:
        """Which run of the agent this is attached to, as far as is known: one that has ended is noticed by who asks it,
        or by `attached`. 0 for none."""
        connection = self._connection
        return connection.epoch if connection is not None and not connection.closed else 0

    def attached(self) -> bool:
        """Whether there still is an agent, as the socket knows it. Costs a system call, and waits for nobody."""
        connection = self._connection
        return connection is not None and connection.alive()

    def connect(self) -> bool:
        """Start-up: connect, starting an agent if the settings allow it. False when there is none: serve without."""
        with self._lock:
            start = self._settings.agent.autostart and self._rank == 0
            return self._connect(start=start, timeout_s=self._settings.agent.start_timeout_s) is not None

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _connect(self, *, start: bool, timeout_s: float) -> Connection | None:
        deadline = self._clock() + timeout_s
        try:
            connection = connect_or_start(
                self._settings.agent, self._role, start=start, timeout_s=timeout_s, clock=self._clock
            )
        except AgentUnavailable as error:
            self._pause("agent_unavailable", error)
            return None
        try:
            # An agent that was just started took its time, and answers quickly now.
            self._attach(connection, max(deadline - self._clock(), self._call_timeout_s if start else 0.0))
        except (AgentUnavailable, ProtocolError, ConfigError, OSError) as error:
            connection.close()
            self._pause("attach_failed", error)
            return None
        self._connection = connection
        self._tell_all()
        self._pause_s = self._settings.agent.reconnect_s
        self.stats.count("connected")
        return connection

    def _pause(self, reason: str, error: Exception) -> None:
        """Leave the agent alone, twice as long each time: an engine must not wait for it again and again."""
        self._next_try = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_FACTOR * self._settings.agent.reconnect_s)
        self.stats.trouble(reason, error)

    def _attach(self, connection: Connection, timeout_s: float) -> float:
        """Returns what is left of `timeout_s`, to which mapping does not count: it waits for nobody."""
        deadline = self._clock() + timeout_s
        message = self._attach_message(connection.next_id())
        attached, fds = connection.call_with_fds(message, Attached, timeout_s=timeout_s)
        left_s = deadline - self._clock()
        self._ns = attached.ns
        self._map(connection.epoch, attached, fds)
        return left_s

    def _attach_message(self, identity: int) -> Attach:
        return Attach(identity, self._namespace.to_json(), self._engine_id, self._rank, self._ranks)

    def _map(self, epoch: int, attached: Attached, fds: list[int]) -> None:
        """The leader maps nothing."""

    def _usable(self) -> tuple[Connection, int, float] | None:
        """The connection, the namespace's number on it, and until when a call may wait for the agent.

        Never starts an agent and never waits for one beyond that.
        """
        with self._lock:
            connection = self._connection
            now = self._clock()
            if now < self._next_try:
                self.stats.count("calls_in_pause")
                return None
            if connection is None or connection.closed:
                connection = self._connect(start=False, timeout_s=self._call_timeout_s)
            return None if connection is None else (connection, self._ns, now + self._call_timeout_s)

    def _call(
        self,
        connection: Connection,
        message: Message,
        expected: type[R],
        deadline: float,
        *,
        on_late: Callable[[Reply], None] | None = None,
    ) -> R:
        """Raises AgentUnavailable, with the trouble counted and, after a time-out, a pause begun."""
        try:
            reply = connection.call(message, expected, timeout_s=deadline - self._clock(), on_late=on_late)
        except AgentTimeout as error:
            self._pause("agent_timeout", error)
            raise
        except AgentUnavailable as error:
            self.stats.trouble("agent_unavailable", error)
            raise
        self._pause_s = self._settings.agent.reconnect_s
        return reply

    def _tell(self, message: Told, epoch: int) -> None:
        """To the agent run `epoch` alone: another one knows nothing of its slots and leases.

        While the connection to that run is broken the message is kept, and told once there is another.
        """
        connection = self._connection
        if connection is None or connection.epoch != epoch:
            return
        self._untold.append((epoch, message))
        self._tell_all()

    def _tell_all(self) -> None:
        """Releases, commits and abandons may be told twice; what ended already is ignored.

        Several threads tell at once, and the agent may be replaced meanwhile: a message is kept with its epoch, and the
        connection is looked at after the message was taken, so one of another epoch is of a run that is over.
        """
        while self._untold:
            try:
                epoch, message = self._untold.popleft()
            except IndexError:  # another thread was quicker
                return
            connection = self._connection
            if connection is None or connection.epoch != epoch:
                continue
            try:
                if not connection.closed:
                    connection.post(replace(message, ns=self._ns))
                    continue
            except AgentUnavailable as error:
                self.stats.trouble("agent_unavailable", error)
            self._untold.appendleft((epoch, message))
            return

    def _slots_of(self, connection: Connection, data: bytes) -> array[int]:
        try:
            return unpack_u32(data)
        except ProtocolError as error:
            connection.close()
            raise AgentUnavailable(f"the agent broke the protocol: {error}") from error
