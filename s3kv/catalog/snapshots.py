"""Snapshots in the bucket: listing them, reading them piece by piece, writing one from the index.

Neither direction holds a snapshot in memory: reading takes pieces, writing goes through a file that is mapped for the
upload.
"""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO

import numpy as np

from s3kv.catalog import names
from s3kv.catalog.context import Context
from s3kv.catalog.entry import is_stored
from s3kv.catalog.faults import translated
from s3kv.catalog.index import Index
from s3kv.errors import CorruptData
from s3kv.format.columns import GROUP, ROW, SnapshotBlock
from s3kv.format.keys import parse_snap_key, snap_key, snap_prefix
from s3kv.format.limits import ID_BYTES, U32
from s3kv.format.snapshot import (
    BLOCK_TARGET_BYTES,
    SegmentName,
    SnapshotHeader,
    SnapshotReader,
    encode_snapshot_blocks,
)
from s3kv.store import ObjectMeta

HEAD_BYTES = 64 << 10
PIECE_BYTES = 4 << 20
PAGE_ENTRIES = 256


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A listed snapshot."""

    name: SegmentName
    meta: ObjectMeta

    @property
    def epoch(self) -> int:
        return self.name.seq

    @property
    def packed(self) -> bytes:
        return names.packed(self.name)


async def list_snapshots(context: Context) -> tuple[list[Snapshot], list[Snapshot]]:
    """Those that can be trusted (`Context.trusts`), highest epoch first, and those that cannot. Raises StoreError."""
    found: list[Snapshot] = []
    ahead: list[Snapshot] = []
    async for page in context.store.list(snap_prefix(context.spec.name)):
        for meta in page:
            key = parse_snap_key(meta.key)
            name = names.of_snapshot(key) if key is not None else None
            if name is not None:
                trusted = context.trusts(name.time_us, meta.modified)
                (found if trusted else ahead).append(Snapshot(name, meta))
    return sorted(found, key=lambda snapshot: (snapshot.epoch, snapshot.name.time_us), reverse=True), ahead


async def read_header(context: Context, snapshot: Snapshot) -> SnapshotHeader:
    """Reads only as much as the header. Raises StoreError, CorruptData."""
    reader = SnapshotReader(expect_namespace=context.spec.digest)
    async for piece in _pieces(context, snapshot, HEAD_BYTES):
        reader.feed(piece)
        if reader.header is not None:
            return _checked(reader.header, snapshot)
    raise CorruptData(f"snapshot {snapshot.meta.key} ends early")


def _checked(header: SnapshotHeader, snapshot: Snapshot) -> SnapshotHeader:
    if (header.time_us, header.epoch) != (snapshot.name.time_us, snapshot.epoch):
        raise CorruptData(f"snapshot {snapshot.meta.key} holds another")
    return header


async def _pieces(context: Context, snapshot: Snapshot, piece_bytes: int) -> AsyncIterator[memoryview]:
    """Views of one buffer, each valid until the next."""
    buffer = memoryview(bytearray(min(piece_bytes, snapshot.meta.size)))
    for offset in range(0, snapshot.meta.size, piece_bytes):
        piece = buffer[: min(piece_bytes, snapshot.meta.size - offset)]
        await context.store.get_into(snapshot.meta.key, piece, offset)
        yield piece


async def read_blocks(context: Context, snapshot: Snapshot) -> AsyncIterator[list[SnapshotBlock]]:
    """The blocks of a whole snapshot. Raises CorruptData, also at the end when it was not whole; StoreError."""
    reader = SnapshotReader(expect_namespace=context.spec.digest)
    async for piece in _pieces(context, snapshot, PIECE_BYTES):
        yield await context.read(reader.feed, piece)
    reader.close()


async def write_snapshot(context: Context, index: Index, header: SnapshotHeader, drop_before_hour: int) -> ObjectMeta:
    """Puts a snapshot of `index` under the key that `header` names. Leaves out tombstones noted before that hour.

    Raises StoreError (AlreadyExists: somebody took the very key), IndexUnwritable (no room for the file). Cancelled or
    failed, there is a whole snapshot or none.
    """
    key = snap_key(context.spec.name, header.time_us, header.epoch)
    with translated(writing=True), TemporaryFile(dir=index.folder) as file:
        await context.read(_fill, file, index, header, drop_before_hour)
        # Unmapped when the last view goes: a thread of the store may hold one for a moment after its call returned.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        await context.store.put_if_absent(key, memoryview(mapped))
    return await context.store.head(key)


def _fill(file: IO[bytes], index: Index, header: SnapshotHeader, drop_before_hour: int) -> None:
    for piece in encode_snapshot_blocks(header, snapshot_blocks(index, drop_before_hour)):
        file.write(piece)
    file.flush()


def snapshot_blocks(index: Index, drop_before_hour: int) -> Iterator[SnapshotBlock]:
    """The index as blocks of a snapshot, in order of chunk id. Entries that change meanwhile are read in either state:
    what changed them is not among the segments that the snapshot covers."""
    batch: list[bytes] = []
    size = 0
    for value in _packed_entries(index):
        if not is_stored(value) and _noted_hour(value) < drop_before_hour:
            continue
        if batch and size + len(value) > BLOCK_TARGET_BYTES:
            yield _block(batch)
            batch, size = [], 0
        batch.append(value)
        size += len(value)
    if batch:
        yield _block(batch)


def _packed_entries(index: Index) -> Iterator[bytes]:
    after = b""
    while page := index.packed(after, PAGE_ENTRIES):
        after = page[-1][0]
        yield from (value for _, value in page)


_HOUR = slice(28, 32)
assert ROW.fields is not None and ROW.fields["hour"][1] == _HOUR.start


def _noted_hour(value: bytes) -> int:
    return int.from_bytes(value[_HOUR], "little")


def _block(packed: list[bytes]) -> SnapshotBlock:
    rows = np.frombuffer(b"".join(value[: ROW.itemsize] for value in packed), ROW)
    to_hash = ROW.itemsize + rows["n_blocks"].astype(np.int64) * ID_BYTES
    to_group = to_hash + rows["n_groups"].astype(np.int64) * GROUP.itemsize
    ends = list(zip(packed, to_hash.tolist(), to_group.tolist(), strict=True))
    hashes = b"".join(value[ROW.itemsize : end] for value, end, _ in ends)
    groups = b"".join(value[begin:end] for value, begin, end in ends)
    shards = b"".join(value[begin:] for value, _, begin in ends)
    return SnapshotBlock(
        rows=rows,
        hashes=np.frombuffer(hashes, np.uint8).reshape(-1, ID_BYTES),
        shards=np.frombuffer(shards, np.uint8),
        groups=np.frombuffer(groups, GROUP),
    )


def next_epoch(listed: list[Snapshot]) -> int:
    return min(U32, 1 + max((snapshot.epoch for snapshot in listed), default=0))
