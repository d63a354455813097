"""The fetcher by itself: what is on its way, and what it believes of a record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from support.agents import small_chain, small_spec

from s3kv.agent.fetcher import Fetcher
from s3kv.agent.metrics import AgentMetrics
from s3kv.agent.pages import Pages
from s3kv.agent.weights import ByteSemaphore
from s3kv.catalog.entry import ChunkEntry, Location
from s3kv.errors import Transient
from s3kv.format.header import chunk_id, header_size
from s3kv.format.records import ChunkAdded, DeleteReason, GroupObject, Stamp
from s3kv.identity import ROOT
from s3kv.settings import FetchSettings
from s3kv.store.memory import MemoryStore
from s3kv.tier.arena import Arena
from s3kv.tier.directory import Directory

SPEC = small_spec()
CHAIN = small_chain(SPEC, 1, 4)
IDENTITY = chunk_id(SPEC.digest, ROOT, CHAIN)


class OneChunk:
    """A catalog that knows CHAIN as one chunk; `forgotten` once it was told so."""

    def __init__(self) -> None:
        page = SPEC.parts[0].group_bytes[0]
        head = header_size(len(CHAIN), 1)
        groups = (GroupObject(head + page * len(CHAIN), head),) * len(SPEC.groups)
        self.added = ChunkAdded(IDENTITY, Stamp(1, 1), ROOT, 0, tuple(CHAIN), 1, (0,), groups)
        self.forgotten: list[DeleteReason] = []

    def lookup(self, hashes: Sequence[bytes]) -> list[Location]:
        return [] if self.forgotten else [Location(IDENTITY, CHAIN.index(block), len(CHAIN)) for block in hashes]

    def chunk(self, identity: bytes) -> ChunkEntry:
        return ChunkEntry(self.added, 0)

    async def forget(self, chunks: Sequence[bytes], reason: DeleteReason) -> int:
        self.forgotten.append(reason)
        return 1


class Rig:
    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.catalog = OneChunk()
        self.directory = Directory(16, [0], slot_bytes_all_parts=4096, dirty_max_slots=0)
        self.arena = Arena.create(16, 4096)
        self.fetcher = Fetcher(
            settings=FetchSettings(),
            store=MemoryStore(),
            catalog=self.catalog,  # type: ignore[arg-type]
            directory=self.directory,
            pages=Pages(SPEC, {0: self.arena}),
            inflight=ByteSemaphore(1 << 20),
            threads=threads,
            metrics=AgentMetrics(),
        )

    async def ended(self) -> None:
        while self.fetcher.running_chunks:
            await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with ThreadPoolExecutor(1) as threads:
        rig = Rig(threads)
        yield rig
        await rig.fetcher.stop()
        rig.directory.check()
        rig.arena.close()


async def test_a_fetch_begun_as_another_of_its_blocks_ends_stays_on_its_way(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    reads: list[int] = []
    seen: list[int] = []

    async def read(*_: Any) -> None:
        reads.append(0)
        if len(reads) == 1:
            # Runs after this fetch has given its slots back, and before it is known to have ended.
            asyncio.get_running_loop().call_soon(lambda: seen.append(rig.fetcher.start(CHAIN)))
            raise Transient("down")
        await gate.wait()

    monkeypatch.setattr(rig.fetcher, "_read", read)
    assert rig.fetcher.start(CHAIN) == 4
    for _ in range(8):
        await asyncio.sleep(0)
    assert (len(reads), seen) == (2, [4])
    assert all(rig.fetcher.on_its_way(block) for block in CHAIN)
    gate.set()
    await rig.ended()
    assert not any(rig.fetcher.on_its_way(block) for block in CHAIN)


@pytest.mark.parametrize("blocks", [1, 4], ids=["frames", "whole"])
@pytest.mark.parametrize("lie", [GroupObject(5 << 30, 1 << 30), GroupObject(1 << 30, 64)], ids=["header", "size"])
async def test_a_records_lengths_are_checked_before_memory_is_taken_for_them(
    rig: Rig, blocks: int, lie: GroupObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def allocate(size: int = 0) -> bytearray:
        taken.append(size)
        return bytearray(min(size, 1 << 20))

    monkeypatch.setattr("s3kv.agent.fetcher.bytearray", allocate, raising=False)
    rig.catalog.added = replace(rig.catalog.added, groups=(lie,) * len(SPEC.groups))
    rig.fetcher.start(CHAIN[:blocks])
    await rig.ended()
    assert rig.catalog.forgotten == [DeleteReason.CORRUPT]
    assert max(taken, default=0) < 1 << 16
