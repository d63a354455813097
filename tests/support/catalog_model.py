"""The catalog as a dict: what any number of agents must agree on, computed from every segment that was ever written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from s3kv.catalog.catalog import Catalog
from s3kv.catalog.entry import ChunkEntry, unpack
from s3kv.format.keys import parse_log_key
from s3kv.format.records import ChunkAdded, ChunkDeleted
from s3kv.format.segment import decode_segment
from s3kv.store.base import Body
from s3kv.store.buffers import body_parts
from s3kv.store.memory import MemoryStore


class Died(BaseException):
    """The process that made this call is gone."""


class RecordingStore(MemoryStore):
    """Remembers every record of the log, and lets a caller die at its n-th call: before the call, or right after."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.history: list[ChunkAdded | ChunkDeleted] = []
        self.times: list[float] = []  # when each record became durable
        self.dies_in: int | None = None
        self.dies_after = False

    def _step(self, *, after: bool) -> None:
        if self.dies_in is None or after is not self.dies_after:
            return
        self.dies_in -= 1
        if self.dies_in <= 0:
            self.dies_in = None
            raise Died

    async def put_if_absent(self, key: str, body: Body) -> str:
        self._step(after=False)
        etag = await super().put_if_absent(key, body)
        if parse_log_key(key) is not None:
            records = decode_segment(b"".join(body_parts(body))).records
            facts = [record for record in records if isinstance(record, ChunkAdded | ChunkDeleted)]
            self.history += facts
            self.times += [self._clock()] * len(facts)
        self._step(after=True)
        return etag

    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        self._step(after=False)
        return await super().get_with_etag(key, max_bytes)

    async def delete(self, keys: Sequence[str]) -> list[object]:  # type: ignore[override]
        """Dying after it leaves half of the keys deleted."""
        self._step(after=False)
        dying = self.dies_in == 1 and self.dies_after
        await super().delete(list(keys)[: len(keys) // 2] if dying else keys)
        self._step(after=True)
        return []

    def stored(self, before: float = math.inf) -> dict[bytes, ChunkAdded]:
        """Who won of what was durable `before`, by the rule in words: the later stamp; of equal ones the deletion."""
        winners: dict[bytes, ChunkAdded | ChunkDeleted] = {}
        for record, time in zip(self.history, self.times, strict=True):
            if time >= before:
                continue
            held = winners.get(record.chunk_id)
            rank = (*record.stamp, isinstance(record, ChunkDeleted))
            if held is None or rank > (*held.stamp, isinstance(held, ChunkDeleted)):
                winners[record.chunk_id] = record
        return {name: record for name, record in winners.items() if isinstance(record, ChunkAdded)}


def check_catalog(catalog: Catalog) -> None:
    """The tables of its index agree with each other, and lookups with the tables."""
    index = catalog._index
    assert index is not None
    entries = [unpack(value) for _, value in index.packed(b"", 1 << 20)]
    stored = [entry for entry in entries if isinstance(entry, ChunkEntry)]
    counts = index.counts()
    assert (counts.chunks, counts.tombstones) == (len(stored), len(entries) - len(stored))
    assert counts.bytes == sum(entry.size for entry in stored)
    assert counts.blocks == sum(len(entry.blocks) for entry in stored)
    for entry in stored:
        found = catalog.lookup(entry.blocks)
        assert len(found) == len(entry.blocks)
        for at, (name, place) in enumerate(zip(entry.blocks, found, strict=True)):
            holder = catalog.chunk(place.chunk_id)
            assert holder is not None and holder.blocks[place.index] == name
            assert place.blocks == len(holder.blocks) >= len(entry.blocks)
            assert (entry.chunk_id, at) in [each[:2] for each in index.locations(name)]
