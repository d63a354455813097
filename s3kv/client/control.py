"""The commands' side of the protocol: one question, one answer, with errors a person can read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from s3kv.client.connection import Connection
from s3kv.client.protocol import (
    MAX_BLOCKS,
    Done,
    Drain,
    Drained,
    Forget,
    Look,
    Looked,
    Message,
    Metrics,
    Prefetch,
    Prefetched,
    Report,
    Status,
    Stop,
    join_hashes,
)
from s3kv.settings import AgentSettings

ANSWER_S = 10.0
"""How long an agent may take to answer what costs it nothing."""
_MARGIN_S = 5.0

R = TypeVar("R", bound=Message)


class Control:
    """A connection in the role cli. Every call raises AgentUnavailable, with a sentence, when it gets no answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, settings: AgentSettings) -> Control:
        return cls(Connection.open(settings.socket, "cli", timeout_s=ANSWER_S, trusted=settings.trusted_uid))

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    @property
    def version(self) -> str:
        return self._connection.version

    def status(self) -> dict[str, Any]:
        report = self._ask(Status(self._connection.next_id()), Report)
        fields: dict[str, Any] = json.loads(report.text)
        return fields

    def metrics(self) -> str:
        """Prometheus text."""
        return self._ask(Metrics(self._connection.next_id()), Report).text.decode()

    def drain(self, deadline_s: float) -> tuple[int, int]:
        """(chunks stored, blocks that were not)."""
        drained = self._ask(Drain(self._connection.next_id(), deadline_s), Drained, deadline_s)
        return drained.chunks, drained.unsaved_blocks

    def stop(self, deadline_s: float) -> tuple[int, int]:
        """As `drain`; the agent ends then."""
        drained = self._ask(Stop(self._connection.next_id(), deadline_s), Drained, deadline_s)
        return drained.chunks, drained.unsaved_blocks

    def forget(self, namespace: str) -> int:
        """Blocks dropped from the tier; "" for every namespace."""
        return self._ask(Forget(self._connection.next_id(), namespace), Done).count

    def look(self, namespace: str, hashes: Sequence[bytes]) -> tuple[int, int]:
        """(blocks of the prefix that host memory holds, blocks of the prefix that the bucket holds)."""
        looked = self._ask(Look(self._connection.next_id(), namespace, join_hashes(hashes[:MAX_BLOCKS])), Looked)
        return looked.resident, looked.stored

    def prefetch(self, namespace: str, hashes: Sequence[bytes], deadline_s: float) -> tuple[int, int]:
        """(blocks of the prefix that host memory holds afterwards, blocks of the chain that are missing)."""
        message = Prefetch(self._connection.next_id(), namespace, join_hashes(hashes[:MAX_BLOCKS]), deadline_s)
        done = self._ask(message, Prefetched, deadline_s)
        return done.resident, done.missing

    def _ask(self, message: Message, expected: type[R], extra_s: float = 0.0) -> R:
        return self._connection.call(message, expected, timeout_s=ANSWER_S + extra_s + (_MARGIN_S if extra_s else 0.0))


@contextmanager
def control(settings: AgentSettings) -> Iterator[Control]:
    with Control.open(settings) as opened:
        yield opened
