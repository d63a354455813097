"""An agent that answers what it was told to answer and no more, and time that passes only while a client waits.

Everything happens in the test's own thread: the answers lie in the socket before they are asked for, and a client that
polls for one that is not there finds its time-out gone at once.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from s3kv.client import protocol as p


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class _Instead:
    """A module with some names replaced, for one importer alone."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Prepared(socket.socket):
    def connect(self, address: Any) -> None:
        """It is connected already."""


class SilentAgent:
    """`answers[i]` is what the i-th connection finds in its socket; none left: nobody listens.

    `delay_s` passes before each answer is seen.
    """

    def __init__(self, clock: Clock, answers: Sequence[bytes], delay_s: float = 0.0) -> None:
        self.clock = clock
        self.answers = list(answers)
        self.delay_s = delay_s
        self.peers: list[socket.socket] = []
        self.opened_at: list[float] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr("s3kv.client.connection.socket", _Instead(socket, socket=lambda *_: self._open()))
        patch.setattr("s3kv.client.connection.select", _Instead(select, poll=lambda: _Poll(self)))

    def _open(self) -> socket.socket:
        self.opened_at.append(self.clock.now)
        if not self.answers:
            raise ConnectionRefusedError(111, "Connection refused")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.sendall(self.answers.pop(0))
        ours.setblocking(False)
        self.peers.append(ours)
        return _Prepared(fileno=theirs.detach())

    def say(self, message: Any) -> None:
        """A further answer on the newest connection."""
        self.peers[-1].sendall(p.encode(message))

    def heard(self) -> list[Any]:
        """What the newest connection has sent since the last time."""
        data = bytearray()
        try:
            while piece := self.peers[-1].recv(1 << 20):
                data += piece
        except BlockingIOError:
            pass
        messages = []
        while data:
            end = p.LENGTH.size + p.frame_length(data)
            messages.append(p.decode_request(bytes(data[p.LENGTH.size : end])))
            del data[:end]
        return messages

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


class _Poll:
    """Never waits: an answer that is there costs `delay_s`, one that is not costs the whole time-out."""

    def __init__(self, agent: SilentAgent) -> None:
        self._agent = agent
        self._poll = select.poll()

    def register(self, *arguments: Any) -> None:
        self._poll.register(*arguments)

    def poll(self, timeout_ms: float) -> list[Any]:
        ready = self._poll.poll(0)
        wait_s = self._agent.delay_s if ready else timeout_ms / 1000
        if wait_s > timeout_ms / 1000:
            ready, wait_s = [], timeout_ms / 1000
        self._agent.clock.now += wait_s
        return ready


def welcome(epoch: int = 5) -> bytes:
    return p.encode(p.Welcome(1, p.PROTOCOL, epoch, "test"))


def attached() -> bytes:
    return p.encode(p.Attached(2, 1, (), False))


def mapped() -> bytes:
    return p.encode(p.Done(3))
