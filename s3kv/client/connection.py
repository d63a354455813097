"""One connection to the agent: synchronous, every call with a deadline.

After a call that ran out of time the connection stays open: its leases live with it. The late reply is read by the
next call, which gives back the lease it names. Only a broken peer or a broken frame closes the connection. What a
message without a reply could not write at once stays in an outbox: a release must not be lost while its agent lives.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from s3kv.client.protocol import (
    LENGTH,
    PROTOCOL,
    Hello,
    Message,
    Refused,
    Reply,
    Welcome,
    decode_reply,
    encode,
    frame_length,
)
from s3kv.client.trust import may_serve, peer_of, pidfd_of
from s3kv.errors import AgentTimeout, AgentUnavailable, ProtocolError

_RECEIVE_BYTES = 1 << 18
_MAX_FDS = 8
MAX_OUTBOX_BYTES = 16 << 20

R = TypeVar("R", bound=Message)


class AgentRefused(AgentUnavailable):
    """An agent is there and does not serve this client. Next: what its text says; another one is not to be started.

    `passing`: it may serve it later.
    """

    def __init__(self, text: str, *, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing


class Connection:
    """Thread-safe. `_lock` is its who waits for a reply; it guards the buffer and the descriptors that came with the
    last frames. `_sending` guards the outbox, and nobody waits with it: a message without a reply is sent at any time.
    """

    def __init__(self, sock: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._sock = sock
        self._clock = clock
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._ids = itertools.count(1)
        self._buffer = bytearray()
        self._fds: list[int] = []
        sock.setblocking(False)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._outbox = bytearray()
        self._late: dict[int, Callable[[Reply], None]] = {}
        self._closed = False
        self.epoch = 0
        self.version = ""

    @classmethod
    def open(
        cls,
        path: Path,
        role: str,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        trusted: int | None = None,
    ) -> Connection:
        """Connect and greet. `trusted`: a user, besides this one and root, who may run the agent.

        Raises AgentUnavailable when no agent answers within `timeout_s`, AgentRefused when one does not serve this
        client: it is of another release, of another user (who is told nothing), or has `agent.max_clients` of them.
        """
        deadline = clock() + timeout_s
        sock: socket.socket | None = None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            sock.connect(os.fspath(path))
            peer = peer_of(sock)
            serves = peer.uid == trusted or may_serve(peer, os.geteuid(), path)
        except OSError as error:
            if sock is not None:
                sock.close()
            raise AgentUnavailable(f"no agent answers at {path} (agent.socket): {error.strerror or error}") from error
        if not serves:
            sock.close()
            raise AgentRefused(
                f"the agent at {path} (agent.socket) is run by user {peer.uid}, who could read the prompts' KV: "
                f"it must be run by user {os.geteuid()} or root, or be named in agent.trusted_uid"
            )
        connection = cls(sock, clock)
        try:
            hello = Hello(connection.next_id(), PROTOCOL, role)  # type: ignore[arg-type]
            welcome = connection.call(hello, Welcome, timeout_s=deadline - clock())
        except AgentUnavailable:
            connection.close()
            raise
        connection.epoch, connection.version = welcome.epoch, welcome.version
        return connection

    @property
    def closed(self) -> bool:
        return self._closed

    def alive(self) -> bool:
        """Whether there still is a peer, as the socket knows it, without a word to the agent; never waits.

        The connection is closed if there is none: who has nothing to say would never learn of it.
        """
        hangup = select.poll()  # one a call: several threads may not poll one object at a time
        with contextlib.suppress(ValueError):  # closed meanwhile
            hangup.register(self._sock, select.POLLRDHUP)
            if hangup.poll(0):
                self.close()
        return not self._closed

    def open_pidfd(self) -> int:
        """A descriptor, the caller's to close, that becomes readable when the agent exits; -1: it cannot be watched."""
        try:
            return pidfd_of(self._sock)
        except OSError:
            return -1

    def next_id(self) -> int:
        return next(self._ids)

    def post(self, message: Message) -> None:
        """Send without a reply and without waiting: what the socket does not take now goes out with the next call.

        Raises AgentUnavailable when the peer is gone, or has let MAX_OUTBOX_BYTES pile up (the connection is closed).
        """
        self._send(message)
        self._check_outbox()

    def call(
        self, message: Message, expected: type[R], *, timeout_s: float, on_late: Callable[[Reply], None] | None = None
    ) -> R:
        """Send and wait for the reply. Raises AgentUnavailable on time-out, refusal, or a lost peer.

        `on_late` is called with the reply if it comes after the time-out, in the thread of a later call.
        """
        return self.call_with_fds(message, expected, timeout_s=timeout_s, on_late=on_late)[0]

    def call_with_fds(
        self, message: Message, expected: type[R], *, timeout_s: float, on_late: Callable[[Reply], None] | None = None
    ) -> tuple[R, list[int]]:
        """As `call`; the descriptors that came along are the caller's to close."""
        identity: int = message.id  # type: ignore[attr-defined]
        late: list[tuple[Callable[[Reply], None], Reply]] = []
        try:
            with self._lock:
                deadline = self._clock() + timeout_s
                self._check_outbox()
                try:
                    self._send(message)
                    self._flush(deadline)
                    reply = self._receive(identity, deadline, late)
                except TimeoutError as error:
                    if not self._closed and on_late is not None:
                        self._late[identity] = on_late
                    raise AgentTimeout("the agent did not answer in time") from error
                fds, self._fds = self._fds, []
        finally:
            for callback, message_late in late:
                callback(message_late)
        if isinstance(reply, expected):
            return reply, fds
        close_all(fds)
        if isinstance(reply, Refused):
            raise AgentRefused(reply.text, passing=reply.passing) if reply.fatal else AgentUnavailable(reply.text)
        self.close()
        raise AgentUnavailable(f"the agent answered {type(reply).__name__} instead of {expected.__name__}")

    def wait_closed(self, *, timeout_s: float) -> bool:
        """Whether the peer closed the connection within `timeout_s`; replies that come meanwhile are dropped."""
        try:
            with self._lock:
                self._receive(0, self._clock() + timeout_s, [])
        except (AgentUnavailable, TimeoutError):
            pass
        return self._closed

    def close(self) -> None:
        """Safe to call again, and from another thread than the one that is waiting."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        fds, self._fds = self._fds, []
        close_all(fds)

    def _check_outbox(self) -> None:
        if len(self._outbox) > MAX_OUTBOX_BYTES:
            self.close()
            raise AgentUnavailable("the agent does not read its socket")

    def _flush(self, deadline: float) -> None:
        """Write the outbox. Raises TimeoutError when the socket does not take it all by the deadline."""
        while self._outbox:
            if (left := deadline - self._clock()) <= 0 or not self._writable.poll(left * 1000):
                raise TimeoutError
            self._send()

    def _send(self, message: Message | None = None) -> None:
        """Append to the outbox, and write of it what the socket takes at once."""
        with self._sending:
            if message is not None:
                self._outbox += encode(message)
            while self._outbox:
                if self._closed:
                    raise AgentUnavailable("the connection to the agent is closed")
                try:
                    sent = self._sock.send(self._outbox)
                    del self._outbox[:sent]
                except BlockingIOError:
                    return
                except OSError as error:
                    self.close()
                    raise AgentUnavailable(f"the agent is gone: {error.strerror or error}") from error

    def _receive(self, identity: int, deadline: float, late: list[tuple[Callable[[Reply], None], Reply]]) -> Reply:
        while True:
            reply = self._next_reply(deadline)
            if reply.id == identity:
                return reply
            callback = self._late.pop(reply.id, None)
            if callback is not None:
                late.append((callback, reply))
            fds, self._fds = self._fds, []
            close_all(fds)

    def _next_reply(self, deadline: float) -> Reply:
        try:
            self._fill(LENGTH.size, deadline)
            length = frame_length(self._buffer)
            self._fill(LENGTH.size + length, deadline)
            body = bytes(self._buffer[LENGTH.size : LENGTH.size + length])
            del self._buffer[: LENGTH.size + length]
            return decode_reply(body)
        except ProtocolError as error:
            self.close()
            raise AgentUnavailable(f"the agent broke the protocol: {error}") from error

    def _fill(self, size: int, deadline: float) -> None:
        while len(self._buffer) < size:
            if self._closed:
                raise AgentUnavailable("the connection to the agent is closed")
            left = deadline - self._clock()
            try:
                # poll first: a receive that times out inside recv_fds could have taken descriptors with it;
                # and not select, which fails on descriptors above 1,023
                if left <= 0 or not self._readable.poll(left * 1000):
                    raise TimeoutError
                data, fds, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, _MAX_FDS)
            except TimeoutError:
                raise
            except (OSError, ValueError) as error:
                self.close()
                raise AgentUnavailable(f"the agent is gone: {error}") from error
            self._fds.extend(fds)
            if not data:
                self.close()
                raise AgentUnavailable("the agent closed the connection")
            self._buffer += data


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
