"""Snapshots: state in, state out, in pieces of any size, and a million blocks in columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.format_values import ENTRIES, NAMESPACE, SNAPSHOT_HEADER, added, digests, entries, snapshot_bytes, u32, u64

from s3kv.errors import CorruptData
from s3kv.format.columns import GROUP, KIND_ADDED, ROW, Entry, SnapshotBlock, block_of, entry_bytes
from s3kv.format.records import ChunkDeleted, Stamp
from s3kv.format.snapshot import (
    SegmentName,
    SnapshotHeader,
    SnapshotReader,
    decode_snapshot,
    encode_snapshot,
    encode_snapshot_blocks,
)

headers = st.builds(
    SnapshotHeader, digests, u64, u64, u64, st.lists(st.builds(SegmentName, u64, u32, u32), max_size=3).map(tuple)
)


@given(headers, entries, st.integers(1, 400))
def test_round_trip_in_pieces_of_any_size(header: SnapshotHeader, found: list[Entry], step: int) -> None:
    data = b"".join(encode_snapshot(header, found))
    reader = SnapshotReader(expect_namespace=header.namespace_digest)
    blocks = [block for at in range(0, len(data), step) for block in reader.feed(data[at : at + step])]
    assert reader.close() == header
    assert [entry for block in blocks for entry in block.entries()] == found
    assert reader.rows == len(found)


@given(entries)
def test_columns_take_as_many_bytes_as_said(found: list[Entry]) -> None:
    assert block_of(found).payload_bytes == sum(map(entry_bytes, found))


def test_blocks_are_bounded_and_their_order_is_checked_across_them() -> None:
    many = sorted((Entry(added(number, n_blocks=400)) for number in range(400)), key=lambda e: e.record.chunk_id)
    pieces = list(encode_snapshot(SNAPSHOT_HEADER, many))
    assert len(pieces) > 4 and max(map(len, pieces)) < 2 << 20
    assert [e for block in decode_snapshot(b"".join(pieces))[1] for e in block.entries()] == many
    swapped = [pieces[0], pieces[2], pieces[1], *pieces[3:]]
    for broken in (swapped, pieces[:-1], [*pieces[:-2], pieces[-1]], [*pieces, b"x"]):
        with pytest.raises(CorruptData):
            decode_snapshot(b"".join(broken))


def test_a_block_of_another_snapshot_is_refused() -> None:
    other = [Entry(entry.record, entry.hour + 1) for entry in ENTRIES]
    first, second = list(encode_snapshot(SNAPSHOT_HEADER, ENTRIES)), list(encode_snapshot(SNAPSHOT_HEADER, other))
    with pytest.raises(CorruptData, match="blocks of another"):
        decode_snapshot(b"".join([first[0], second[1], first[2]]))


def test_unsorted_or_repeated_rows_are_not_written() -> None:
    for wrong in (ENTRIES[::-1], (ENTRIES[0], ENTRIES[0])):
        with pytest.raises(ValueError, match="out of order"):
            list(encode_snapshot(SNAPSHOT_HEADER, wrong))


def test_a_snapshot_of_another_namespace_is_refused() -> None:
    with pytest.raises(CorruptData, match="another namespace"):
        decode_snapshot(snapshot_bytes(), expect_namespace=bytes(32))


def test_the_header_says_which_segments_are_folded() -> None:
    header = SnapshotHeader(NAMESPACE, 9, 1, 100, (SegmentName(100, 1, 1),))
    names = SegmentName(99, 5, 5), SegmentName(100, 1, 1), SegmentName(100, 1, 2)
    assert [header.folds(name) for name in names] == [True, True, False]


def columns_of(n_chunks: int, blocks_each: int) -> SnapshotBlock:
    rng = np.random.default_rng(1)
    rows = np.zeros(n_chunks, ROW)
    ids = np.sort(rng.integers(0, 1 << 62, n_chunks, dtype=np.uint64) * 2 + np.arange(n_chunks, dtype=np.uint64) % 2)
    rows["chunk_id"][:, :8] = np.unique(ids).astype(">u8").view(np.uint8).reshape(-1, 8)[:n_chunks]
    rows["kind"], rows["n_blocks"], rows["n_shards"], rows["n_groups"] = KIND_ADDED, blocks_each, 1, 1
    groups = np.zeros(n_chunks, GROUP)
    groups["size"], groups["header_size"] = 1 << 20, 640
    hashes = rng.integers(0, 256, (n_chunks * blocks_each, 16), dtype=np.uint8)
    return SnapshotBlock(rows, hashes, np.zeros(n_chunks, np.uint8), groups)


def test_a_million_blocks_go_through_without_a_step_per_block() -> None:
    whole = columns_of(62_500, 16)
    step = 2_500
    cut = [
        SnapshotBlock(
            whole.rows[at : at + step],
            whole.hashes[at * 16 : (at + step) * 16],
            whole.shards[at : at + step],
            whole.groups[at : at + step],
        )
        for at in range(0, 62_500, step)
    ]
    data = b"".join(encode_snapshot_blocks(SNAPSHOT_HEADER, cut))
    reader = SnapshotReader()
    blocks = reader.feed(data)
    reader.close()
    assert reader.hashes == 1_000_000
    assert np.array_equal(np.concatenate([block.hashes for block in blocks]), whole.hashes)
    assert all(len(block) == step for block in blocks)


def test_wrong_columns_are_refused() -> None:
    good = columns_of(4, 2)
    deleted = block_of([Entry(ChunkDeleted(bytes(16), Stamp(1, 1)))])

    def changed(field: str, value: int, block: SnapshotBlock = good) -> SnapshotBlock:
        rows = block.rows.copy()
        rows[field][-1] = value
        return SnapshotBlock(rows, block.hashes, block.shards, block.groups)

    wrong_group = good.groups.copy()
    wrong_group["header_size"][0] = 0
    for block in (
        changed("kind", 3),
        changed("kind", 2),
        changed("n_blocks", 3),
        changed("n_blocks", 4097),
        changed("kind", 1, deleted),
        SnapshotBlock(good.rows, good.hashes, good.shards, wrong_group),
        SnapshotBlock(good.rows[:0], good.hashes[:0], good.shards[:0], good.groups[:0]),
    ):
        with pytest.raises(ValueError, match="cannot be encoded"):
            list(encode_snapshot_blocks(SNAPSHOT_HEADER, [block]))
