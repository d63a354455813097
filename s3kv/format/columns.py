"""Catalog state as columns: what a snapshot block holds, checked and read without a Python step per chunk.

A row is the winning record of one chunk id, with the hour of its last use; rows ascend by chunk id. What a row has
several of (block hashes, shards, layer groups) lies in arrays of its own, row after row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from s3kv.errors import CorruptData
from s3kv.format.limits import ID_BYTES, MAX_BLOCKS, MAX_GROUPS, MAX_OBJECT_BYTES, MAX_SHARDS
from s3kv.format.records import ChunkAdded, ChunkDeleted, GroupObject, Stamp, delete_reason
from s3kv.format.wire import need

KIND_ADDED, KIND_DELETED = 1, 2

ROW = np.dtype(
    [
        ("chunk_id", "u1", (ID_BYTES,)),
        ("time_us", "<u8"),
        ("agent", "<u4"),
        ("hour", "<u4"),
        ("parent", "u1", (ID_BYTES,)),
        ("start_block", "<u4"),
        ("n_blocks", "<u4"),
        ("kind", "u1"),
        ("code", "u1"),  # codec of an added chunk, reason of a deleted one
        ("n_shards", "u1"),
        ("n_groups", "u1"),
        ("reserved", "<u4"),
    ]
)
GROUP = np.dtype([("size", "<u8"), ("header_size", "<u4")])

Rows = NDArray[np.void]
ByteArray = NDArray[np.uint8]


class Entry(NamedTuple):
    """What the catalog knows of one chunk: its winning record, and the hour of its last use (0: none recorded)."""

    record: ChunkAdded | ChunkDeleted
    hour: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotBlock:
    """Some consecutive rows of a snapshot.

    `rows` has dtype ROW and shape (n,); `hashes` is uint8 of shape (sum of rows["n_blocks"], 16); `shards` is uint8 of
    shape (sum of rows["n_shards"],); `groups` has dtype GROUP and shape (sum of rows["n_groups"],). Read-only when
    decoded. Deleted rows have none of the three.
    """

    rows: Rows
    hashes: ByteArray
    shards: ByteArray
    groups: Rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def payload_bytes(self) -> int:
        return self.rows.nbytes + self.hashes.nbytes + self.shards.nbytes + self.groups.nbytes

    def entries(self) -> Iterator[Entry]:
        """The rows as records, in order. About 5 µs a row: loaders of millions use the columns."""
        hashes, shards = self.hashes.tobytes(), self.shards.tobytes()
        groups = [GroupObject(*group) for group in self.groups.tolist()]
        at_hash = at_shard = at_group = 0
        ids, parents = self.rows["chunk_id"].tobytes(), self.rows["parent"].tobytes()
        for index, row in enumerate(self.rows[_SCALARS].tolist()):
            time_us, agent, hour, start_block, n_blocks, kind, code, n_shards, n_groups = row
            place = slice(index * ID_BYTES, (index + 1) * ID_BYTES)
            stamp = Stamp(time_us, agent)
            if kind == KIND_DELETED:
                yield Entry(ChunkDeleted(ids[place], stamp, delete_reason(code)), hour)
                continue
            end = at_hash + n_blocks * ID_BYTES
            blocks = tuple(hashes[at : at + ID_BYTES] for at in range(at_hash, end, ID_BYTES))
            row_shards = tuple(shards[at_shard : at_shard + n_shards])
            row_groups = tuple(groups[at_group : at_group + n_groups])
            at_hash, at_shard, at_group = end, at_shard + n_shards, at_group + n_groups
            added = ChunkAdded(ids[place], stamp, parents[place], start_block, blocks, code, row_shards, row_groups)
            yield Entry(added, hour)


_SCALARS = ["time_us", "agent", "hour", "start_block", "n_blocks", "kind", "code", "n_shards", "n_groups"]


def entry_bytes(entry: Entry) -> int:
    """How many bytes `entry` takes in a snapshot."""
    record = entry.record
    if isinstance(record, ChunkDeleted):
        return ROW.itemsize
    return ROW.itemsize + ID_BYTES * len(record.blocks) + len(record.shards) + GROUP.itemsize * len(record.groups)


def block_of(entries: Iterable[Entry]) -> SnapshotBlock:
    """The columns of `entries`, which must ascend by chunk id (checked when they are encoded)."""
    rows: list[tuple[Any, ...]] = []
    hashes: list[bytes] = []
    shards = bytearray()
    groups: list[GroupObject] = []
    for record, hour in entries:
        rows.append(_row(record, hour))
        if isinstance(record, ChunkAdded):
            hashes.extend(record.blocks)
            shards += bytes(record.shards)
            groups.extend(record.groups)
    return SnapshotBlock(
        np.array(rows, _ROW_AS_BYTES).view(ROW),
        np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, ID_BYTES),
        np.frombuffer(bytes(shards), np.uint8),
        np.array(groups, GROUP),
    )


# numpy fills a void field from bytes as they are; an array field would be filled from a sequence of numbers, slowly.
_ROW_AS_BYTES = np.dtype(
    [(name, f"V{ID_BYTES}") if name in ("chunk_id", "parent") else (name, ROW[name]) for name in ROW.names or ()]
)


def _row(record: ChunkAdded | ChunkDeleted, hour: int) -> tuple[Any, ...]:
    if isinstance(record, ChunkDeleted):
        return (record.chunk_id, *record.stamp, hour, bytes(ID_BYTES), 0, 0, KIND_DELETED, record.reason, 0, 0, 0)
    counts = len(record.shards), len(record.groups)
    place = record.parent, record.start_block, len(record.blocks)
    return (record.chunk_id, *record.stamp, hour, *place, KIND_ADDED, record.codec_id, *counts, 0)


def check_block(block: SnapshotBlock, after: bytes | None) -> None:
    """CorruptData unless the arrays fit each other, all values are within the limits, and ids ascend from `after`."""
    rows = block.rows
    need(len(rows) > 0, "snapshot block is empty")
    counts = rows["n_blocks"].astype(np.int64), rows["n_shards"].astype(np.int64), rows["n_groups"].astype(np.int64)
    sums = tuple(int(count.sum()) for count in counts)
    need(sums == (len(block.hashes), len(block.shards), len(block.groups)), "snapshot block has wrong counts")
    added = rows["kind"] == KIND_ADDED
    need(bool((added | (rows["kind"] == KIND_DELETED)).all()), "snapshot has a row of unknown kind")
    for count, maximum in zip(counts, (MAX_BLOCKS, MAX_SHARDS, MAX_GROUPS), strict=True):
        need(bool(((count > 0) == added).all() and (count <= maximum).all()), "snapshot row has a wrong count")
    _check_groups(block.groups)
    _check_shards(block.shards, counts[1][added])
    _check_order(rows["chunk_id"], after)


def _check_groups(groups: Rows) -> None:
    size, header = groups["size"], groups["header_size"]
    need(bool(((header > 0) & (header <= size) & (size <= MAX_OBJECT_BYTES)).all()), "snapshot has a wrong object size")


def _check_shards(shards: ByteArray, counts: NDArray[np.int64]) -> None:
    if len(shards) == 0:
        return
    rises = shards[1:] > shards[:-1]
    begins = np.zeros(len(shards), np.bool_)
    begins[np.cumsum(counts)[:-1]] = True
    need(bool((rises | begins[1:]).all()), "snapshot row has shards out of order")


def _check_order(chunk_ids: ByteArray, after: bytes | None) -> None:
    ids = np.ascontiguousarray(chunk_ids)
    halves = ids.view(">u8").astype(np.uint64)
    high, low = halves[:, 0], halves[:, 1]
    ascends = (high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] > low[:-1]))
    need(bool(ascends.all()) and (after is None or ids[0].tobytes() > after), "snapshot rows are out of order")


def view_block(payload: bytes, n_rows: int, n_hashes: int, n_shards: int, n_groups: int) -> SnapshotBlock:
    """The columns in `payload`, as views. CorruptData unless the counts make up exactly its length."""
    ends = np.cumsum([n_rows * ROW.itemsize, n_hashes * ID_BYTES, n_groups * GROUP.itemsize, n_shards]).tolist()
    if ends[-1] != len(payload):
        raise CorruptData("snapshot block has a wrong length")
    view = memoryview(payload)
    return SnapshotBlock(
        rows=np.frombuffer(view[: ends[0]], ROW),
        hashes=np.frombuffer(view[ends[0] : ends[1]], np.uint8).reshape(-1, ID_BYTES),
        groups=np.frombuffer(view[ends[1] : ends[2]], GROUP),
        shards=np.frombuffer(view[ends[2] :], np.uint8),
    )
