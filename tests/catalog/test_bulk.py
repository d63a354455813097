"""A snapshot loaded into an empty index gives what merging it record by record gives."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.catalog_model import check_catalog
from support.catalogs import T0, FakeClock, Node, added, block, chain, namespace

from s3kv.catalog import bulk
from s3kv.catalog.admission import Admission
from s3kv.catalog.bulk import BulkLoader
from s3kv.catalog.entry import merge
from s3kv.catalog.index import Index
from s3kv.format.columns import Entry, SnapshotBlock, block_of
from s3kv.format.records import ChunkAdded, ChunkDeleted, DeleteReason, Stamp, hour_of
from s3kv.identity import ROOT
from s3kv.store.memory import MemoryStore

SPEC = namespace(groups=2)
SKEW_US = 300_000_000
SOURCE_US = int(T0 * 1e6)


def entries(rng: random.Random, count: int) -> list[Entry]:
    """Chunks that share blocks, tombstones, and rows that must not be believed; by chunk id."""
    made: dict[bytes, Entry] = {}
    for number in range(count):
        blocks = chain(number % 37, 12)
        first, length = rng.randrange(6), rng.randint(1, 6)
        parent = blocks[first - 1] if first else ROOT
        time_us = SOURCE_US - rng.randrange(10**12)
        record = added(SPEC, blocks[first : first + length], parent=parent, start=first, time_us=time_us, agent=number)
        luck = rng.random()
        if luck < 0.1:
            record = dataclasses.replace(record, chunk_id=block("forged", number))
        elif luck < 0.15:
            record = dataclasses.replace(record, stamp=Stamp(SOURCE_US + SKEW_US + 1, 1))
        elif luck < 0.2:
            record = dataclasses.replace(record, groups=record.groups[:1])
        hour = rng.choice((0, hour_of(T0) - 5, hour_of(T0) + 10_000))
        if luck > 0.9:
            made[record.chunk_id] = Entry(ChunkDeleted(record.chunk_id, record.stamp, DeleteReason.MISSING), hour)
        else:
            made[record.chunk_id] = Entry(record, hour)
    return [made[name] for name in sorted(made)]


def blocks_of(rows: list[Entry]) -> Iterator[SnapshotBlock]:
    for start in range(0, len(rows), 50):
        yield block_of(rows[start : start + 50])


def contents(index: Index) -> tuple[object, ...]:
    packed = index.packed(b"", 1 << 20)
    names = {name for number in range(37) for name in chain(number, 12)}
    return packed, {name: index.locations(name) for name in names}, index.counts()


@pytest.mark.parametrize("seed", range(4))
def test_loading_in_bulk_equals_merging(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "TRANSACTION_ROWS", 16)
    rows = entries(random.Random(seed), 400)
    admission = Admission(SPEC.digest, 2, SKEW_US)
    loaded = Index.open(tmp_path / "bulk", "x", map_bytes=1 << 26)
    loader = BulkLoader(loaded, admission, SOURCE_US)
    for part in blocks_of(rows):
        loader.add(part)
    counts = loader.finish({}, {})
    merged = Index.open(tmp_path / "merged", "x", map_bytes=1 << 26)
    good = [row for row in rows if admission.admits(row.record, SOURCE_US)]
    assert loader.rejected == len(rows) - len(good) > 0
    for record, hour in good:
        known = min(hour, hour_of(T0 + 300))
        merged.apply([(record, known if isinstance(record, ChunkAdded) or known else hour_of(T0))])
    assert contents(loaded) == contents(merged)
    assert counts.chunks > 100 and counts.tombstones > 10
    loaded.close()
    merged.close()
    again = Index.open(tmp_path / "bulk", "x", map_bytes=1 << 26)
    assert again.counts() == counts
    again.close()


def test_merging_does_not_depend_on_the_order() -> None:
    """The rule itself, over every order of a few records of one chunk."""
    from itertools import permutations

    record = added(SPEC, chain("a", 2))
    records = [
        dataclasses.replace(record, stamp=Stamp(10, 1)),
        dataclasses.replace(record, stamp=Stamp(10, 2)),
        ChunkDeleted(record.chunk_id, Stamp(10, 1)),
        ChunkDeleted(record.chunk_id, Stamp(10, 2)),
        dataclasses.replace(record, stamp=Stamp(11, 1)),
    ]
    for keep in (4, 5):
        outcomes = set()
        for order in permutations(records[:keep]):
            entry = None
            for each in (*order, *order):
                entry = merge(entry, each, 7 if isinstance(each, ChunkDeleted) else 0)
            assert entry is not None
            outcomes.add((type(entry).__name__, entry.stamp))
        assert len(outcomes) == 1


async def test_a_large_snapshot_goes_through_the_bucket_and_back(tmp_path: Path) -> None:
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    a = Node(store, tmp_path / "a", spec=SPEC, clock=clock)
    await a.start()
    for number in range(5):
        await a.catalog.publish([added(SPEC, chain((number, at), 30)) for at in range(800)])
    await a.catalog.forget([added(SPEC, chain((1, at), 30)).chunk_id for at in range(100)], DeleteReason.COLLECTED)
    assert (await a.catalog.compact(force=True)).folded == 6
    b = Node(store, tmp_path / "b", spec=SPEC, agent=2, clock=clock)
    await b.start()
    check_catalog(b.catalog)
    mine, other = a.catalog._index, b.catalog._index
    assert mine is not None and other is not None
    assert mine.packed(b"", 1 << 20) == other.packed(b"", 1 << 20)
    assert mine.counts() == other.counts() and other.counts().chunks == 3900
    a.kill()
    b.kill()
