"""Which chunks are merged, and that merging changes no byte."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.bucket_fill import PAGE_BYTES, Filler, SettableClock, chain, filling, small_namespace, tokens_of

from s3kv.catalog.entry import ChunkEntry
from s3kv.errors import CorruptData
from s3kv.format.keys import chunk_key
from s3kv.format.records import ChunkAdded, GroupObject, Stamp
from s3kv.gc.merge import carry_out, plan_merges
from s3kv.gc.verify import sampled, verify_chunk
from s3kv.identity import REPLICATED, ROOT, GroupSpec, NamespaceSpec, RegionSpec
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


async def test_groups_of_different_shards_are_checked_and_merged(tmp_path: Path) -> None:
    """One group is sharded and one is the same on every rank: each object's header names its own group's shards."""
    regions = (RegionSpec(PAGE_BYTES), RegionSpec(PAGE_BYTES, True))
    groups = tuple(GroupSpec((layer,), None, (region,)) for layer, region in enumerate(regions))
    spec = NamespaceSpec("tests/mixed", "w", "bfloat16", 4, groups, 2)
    assert spec.shards_of_group == ((0, 1), (REPLICATED,))
    hashes = chain(spec, "a", 4)
    async with filling(MemoryStore(), spec, tmp_path, SettableClock()) as filler:
        parts = entries(*[await filler.put_chunk(hashes, start, 2) for start in (0, 2)])
        assert [(await verify_chunk(filler.store, spec, part)).detail for part in parts] == ["", ""]
        record = await carry_out(filler.store, spec, parts)
        assert (await verify_chunk(filler.store, spec, ChunkEntry(record, 0))).good


@pytest.mark.parametrize("damage", ["flipped", "cut", "none"])
async def test_an_object_that_lies_there_already_is_adopted_only_when_it_is_whole(filler: Filler, damage: str) -> None:
    """The parts go next: what is adopted unseen would be all that is left of them."""
    hashes = chain(SPEC, "a", 6)
    parts = entries(*[await filler.put_chunk(hashes, start, 3) for start in (0, 3)])
    record = await carry_out(filler.store, SPEC, parts)
    key = chunk_key(SPEC.name, record.chunk_id, 1)
    body = bytearray(await filler.store.get(key, 1 << 20))
    if damage == "flipped":
        body[-1] ^= 1
    elif damage == "cut":
        del body[-1:]
    await filler.store.put(key, bytes(body))
    again = await carry_out(filler.store, SPEC, parts)
    assert again == record
    assert (await verify_chunk(filler.store, SPEC, ChunkEntry(again, 0))).good


async def test_another_encoding_that_lies_there_is_adopted_with_its_own_sizes(filler: Filler) -> None:
    hashes = chain(SPEC, "a", 4)
    parts = entries(*[await filler.put_chunk(hashes, start, 2) for start in (0, 2)])
    whole = await filler.put_chunk(hashes, 0, 4, publish=False, page_bytes=2 * PAGE_BYTES)
    record = await carry_out(filler.store, SPEC, parts)
    assert (record.chunk_id, record.groups) == (whole.chunk_id, whole.groups)


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


def test_another_seed_verifies_another_sample() -> None:
    ids = [number.to_bytes(16, "big") for number in range(2000)]
    group = GroupObject(100, 64)
    known = [ChunkEntry(ChunkAdded(name, Stamp(1, 1), ROOT, 0, (name,), 0, (0,), (group,)), 0) for name in ids]
    samples = [{each.chunk_id for each in sampled(known, 0.2, seed)} for seed in (0, 1, 2, 365, 2**70)]
    assert all(300 < len(each) < 500 for each in samples)
    assert len(set.union(*samples)) > 1100
    assert samples[0] == {each.chunk_id for each in sampled(known, 0.2, 0)}
    assert len(list(sampled(known, 1.0, 0))) == 2000


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
