"""Which chunks are merged, and that merging changes no byte."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.bucket_fill import Filler, SettableClock, chain, filling, small_namespace, tokens_of

from s3kv.catalog.entry import ChunkEntry
from s3kv.errors import CorruptData
from s3kv.format.keys import chunk_key
from s3kv.format.records import ChunkAdded, GroupObject, Stamp
from s3kv.gc.merge import carry_out, plan_merges
from s3kv.gc.verify import verify_chunk
from s3kv.store.memory import MemoryStore

SPEC = small_namespace(groups=2, shards=2)
TARGET = 1 << 20


@pytest.fixture
async def filler(tmp_path: Path) -> AsyncIterator[Filler]:
    async with filling(MemoryStore(), SPEC, tmp_path, SettableClock()) as opened:
        yield opened


def entries(*records: ChunkAdded) -> list[ChunkEntry]:
    return [ChunkEntry(record, 0) for record in records]


async def test_a_merged_chunk_holds_the_same_bytes(filler: Filler) -> None:
    hashes = chain(SPEC, "a", 7)
    parts = [await filler.put_chunk(hashes, start, count) for start, count in ((0, 2), (2, 1), (3, 4))]
    (merge,) = plan_merges(entries(parts[2], parts[0], parts[1]), TARGET)
    assert list(merge.parts) == [part.chunk_id for part in parts]
    record = await carry_out(filler.store, SPEC, entries(*parts))
    assert record.blocks == tuple(hashes) and record.start_block == 0
    assert (await verify_chunk(filler.store, SPEC, ChunkEntry(record, 0))).good
    await carry_out(filler.store, SPEC, entries(*parts))  # once more: another collector did the same


async def test_nothing_is_merged_across_a_branch_or_beyond_the_target(filler: Filler) -> None:
    shared = tokens_of("shared", 2)
    left, right = chain(SPEC, "left", 4, after=shared), chain(SPEC, "right", 4, after=shared)
    stem = await filler.put_chunk(left, 0, 2)
    branches = [await filler.put_chunk(hashes, start, 2) for hashes in (left, right) for start in (2, 4)]
    merges = plan_merges(entries(stem, *branches), TARGET)
    assert sorted(merge.parts for merge in merges) == sorted(
        [(branches[0].chunk_id, branches[1].chunk_id), (branches[2].chunk_id, branches[3].chunk_id)]
    )
    assert plan_merges(entries(stem, *branches), branches[0].size + 1) == []


async def test_hostile_records_in_a_ring_end() -> None:
    group = GroupObject(100, 64)
    one = ChunkAdded(b"1" * 16, Stamp(1, 1), b"B" * 16, 0, (b"A" * 16,), 0, (0,), (group,))
    two = ChunkAdded(b"2" * 16, Stamp(1, 1), b"A" * 16, 1, (b"B" * 16,), 0, (0,), (group,))
    assert plan_merges(entries(one, two), TARGET) == []


async def test_a_damaged_part_is_not_merged(filler: Filler) -> None:
    hashes = chain(SPEC, "a", 4)
    parts = [await filler.put_chunk(hashes, start, 2) for start in (0, 2)]
    key = chunk_key(SPEC.name, parts[1].chunk_id, 0)
    body = bytearray(await filler.store.get(key, 1 << 20))
    body[40] ^= 1
    await filler.store.put(key, bytes(body))
    with pytest.raises(CorruptData):
        await carry_out(filler.store, SPEC, entries(*parts))
