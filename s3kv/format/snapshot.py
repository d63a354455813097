"""A catalog snapshot: the state that log segments add up to, as a stream of bounded, separately checked blocks.

A snapshot folds every segment whose key's time is below `horizon_us`, and those listed in `covers`. Records may be
applied repeatedly, so a reader that is unsure reads a segment again. Layout: `docs/format.md`, "Catalog snapshot".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import xxhash

from s3kv.errors import CorruptData
from s3kv.format.columns import Entry, SnapshotBlock, block_of, check_block, entry_bytes, view_block
from s3kv.format.limits import (
    DIGEST_BYTES,
    FORMAT,
    MAX_SNAPSHOT_BLOCK_BYTES,
    MAX_SNAPSHOT_COVERS,
    U32,
    U64,
)
from s3kv.format.wire import CHECKSUM, CHECKSUM_BYTES, Buffer, flat, need, seal, unseal

MAGIC = b"S3KVSNP\n"
BLOCK_MAGIC = b"BLK\n"
END_MAGIC = b"END\n"

_HEADER = Struct("<8sII32sQQQI4x")  # magic, format, header bytes, namespace digest, time, epoch, horizon, covers
_COVER = Struct("<QII")  # time, agent, seq
_BLOCK = Struct("<4sIIIIIII")  # magic, index, rows, hashes, shards, groups, payload bytes, 0
_END = Struct("<4sIQQQ")  # magic, blocks, rows, hashes, checksum of the checksums
_PIECE_BYTES = _BLOCK.size + CHECKSUM_BYTES  # a block's head, or the end

BLOCK_TARGET_BYTES = 1 << 20


class SegmentName(NamedTuple):
    """Which log segment: the numbers of its key."""

    time_us: int
    agent: int
    seq: int


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """`time_us` and `epoch` are those of the key. `covers` lists folded segments at or after `horizon_us`."""

    namespace_digest: bytes
    time_us: int
    epoch: int
    horizon_us: int
    covers: tuple[SegmentName, ...] = ()

    def folds(self, segment: SegmentName) -> bool:
        """Whether the snapshot holds what `segment` says."""
        return segment.time_us < self.horizon_us or segment in self.covers


def encode_snapshot(header: SnapshotHeader, entries: Iterable[Entry]) -> Iterator[bytes]:
    """The snapshot's bytes in pieces of about BLOCK_TARGET_BYTES. `entries` ascend by chunk id, else ValueError."""
    return encode_snapshot_blocks(header, _blocks(entries))


def encode_snapshot_blocks(header: SnapshotHeader, blocks: Iterable[SnapshotBlock]) -> Iterator[bytes]:
    """As `encode_snapshot`, of columns. ValueError when they are out of order or outside the limits."""
    head = _encode_header(header)
    yield head
    chain = xxhash.xxh3_64(head[-CHECKSUM_BYTES:])
    count = rows = hashes = 0
    last: bytes | None = None
    for block in blocks:
        try:
            check_block(block, last)
        except CorruptData as error:
            raise ValueError(f"cannot be encoded: {error}") from error
        piece = _encode_block(block, count)
        chain.update(piece[_BLOCK.size : _PIECE_BYTES])
        yield piece
        last = block.rows["chunk_id"][-1].tobytes()
        count, rows, hashes = count + 1, rows + len(block.rows), hashes + len(block.hashes)
    yield seal(_END.pack(END_MAGIC, count, rows, hashes, chain.intdigest()))


class SnapshotReader:
    """Reads a snapshot from its bytes in pieces of any size; holds at most one block beyond the piece given.

    `feed` in order, then `close`. Blocks are right as they come (each has its checksum), but only `close` says that
    the snapshot was whole. After an error the reader is of no more use.
    """

    def __init__(self, *, expect_namespace: bytes | None = None) -> None:
        self.header: SnapshotHeader | None = None
        self.rows = 0
        self.hashes = 0
        self._expect_namespace = expect_namespace
        self._pending = bytearray()
        self._blocks = 0
        self._last_id: bytes | None = None
        self._chain = xxhash.xxh3_64()
        self._ended = False

    def feed(self, data: Buffer) -> list[SnapshotBlock]:
        """The blocks that `data` completes. CorruptData at the first byte that is not right."""
        self._pending += flat(data)
        blocks: list[SnapshotBlock] = []
        position = 0
        with memoryview(self._pending) as view:
            while (taken := self._step(view[position:], blocks)) > 0:
                position += taken
        del self._pending[:position]
        return blocks

    def close(self) -> SnapshotHeader:
        """The header, when all of the snapshot was read; CorruptData when it ended early."""
        need(self._ended and not self._pending, "snapshot ends early")
        assert self.header is not None
        return self.header

    def _step(self, view: memoryview, blocks: list[SnapshotBlock]) -> int:
        """Bytes of the piece at the start of `view` that was read, 0 when it is not complete yet."""
        need(not (self._ended and view), "snapshot has bytes after its end")
        if self.header is None:
            return self._read_header(view)
        if len(view) < _PIECE_BYTES:
            return 0
        if view[:4] == END_MAGIC:
            return self._read_end(view[:_PIECE_BYTES])
        return self._read_block(view, blocks)

    def _read_header(self, view: memoryview) -> int:
        if len(view) < _HEADER.size:
            return 0
        magic, version, size, namespace, time_us, epoch, horizon_us, n_covers = _HEADER.unpack(view[: _HEADER.size])
        need(magic == MAGIC, "not a catalog snapshot")
        need(version == FORMAT, f"snapshot has format {version}, not {FORMAT}")
        need(n_covers <= MAX_SNAPSHOT_COVERS, "snapshot covers too many segments")
        need(size == _HEADER.size + n_covers * _COVER.size + CHECKSUM_BYTES, "snapshot header has a wrong length")
        if len(view) < size:
            return 0
        body = unseal(view[:size], "snapshot header")
        expected = self._expect_namespace
        need(expected is None or namespace == expected, "snapshot belongs to another namespace")
        covers = tuple(SegmentName(*name) for name in _COVER.iter_unpack(body[_HEADER.size :]))
        self.header = SnapshotHeader(namespace, time_us, epoch, horizon_us, covers)
        self._chain.update(view[size - CHECKSUM_BYTES : size])
        return int(size)

    def _read_block(self, view: memoryview, blocks: list[SnapshotBlock]) -> int:
        magic, index, n_rows, n_hashes, n_shards, n_groups, size, _ = _BLOCK.unpack(view[: _BLOCK.size])
        need(magic == BLOCK_MAGIC and index == self._blocks, "snapshot block is out of order")
        need(size <= MAX_SNAPSHOT_BLOCK_BYTES, "snapshot block is larger than the format allows")
        if len(view) < _PIECE_BYTES + size:
            return 0
        payload = bytes(view[_PIECE_BYTES : _PIECE_BYTES + size])
        stored = view[_BLOCK.size : _PIECE_BYTES]
        need(CHECKSUM.unpack(stored)[0] == _block_checksum(view[: _BLOCK.size], payload), "snapshot block is damaged")
        block = view_block(payload, n_rows, n_hashes, n_shards, n_groups)
        check_block(block, self._last_id)
        self._chain.update(stored)
        self._last_id = block.rows["chunk_id"][-1].tobytes()
        self._blocks, self.rows, self.hashes = index + 1, self.rows + n_rows, self.hashes + n_hashes
        blocks.append(block)
        return _PIECE_BYTES + int(size)

    def _read_end(self, view: memoryview) -> int:
        _, count, rows, hashes, chain = _END.unpack(unseal(view, "snapshot end"))
        need((count, rows, hashes) == (self._blocks, self.rows, self.hashes), "snapshot has wrong totals")
        need(chain == self._chain.intdigest(), "snapshot has blocks of another")
        self._ended = True
        return _PIECE_BYTES


def decode_snapshot(
    data: Buffer, *, expect_namespace: bytes | None = None
) -> tuple[SnapshotHeader, list[SnapshotBlock]]:
    """A whole snapshot at once; `SnapshotReader` reads large ones piece by piece."""
    reader = SnapshotReader(expect_namespace=expect_namespace)
    blocks = reader.feed(data)
    return reader.close(), blocks


def _encode_header(header: SnapshotHeader) -> bytes:
    numbers = header.time_us, header.epoch, header.horizon_us
    if len(header.namespace_digest) != DIGEST_BYTES or not all(0 <= number <= U64 for number in numbers):
        raise ValueError("snapshot header is outside the limits of the format")
    if len(header.covers) > MAX_SNAPSHOT_COVERS:
        raise ValueError(f"a snapshot covers at most {MAX_SNAPSHOT_COVERS} segments past its horizon")
    if not all(0 <= time_us <= U64 and 0 <= agent <= U32 and 0 <= seq <= U32 for time_us, agent, seq in header.covers):
        raise ValueError("a covered segment is outside the limits of the format")
    size = _HEADER.size + len(header.covers) * _COVER.size + CHECKSUM_BYTES
    fixed = _HEADER.pack(MAGIC, FORMAT, size, header.namespace_digest, *numbers, len(header.covers))
    return seal(b"".join([fixed, *(_COVER.pack(*name) for name in header.covers)]))


def _encode_block(block: SnapshotBlock, index: int) -> bytes:
    arrays = block.rows, block.hashes, block.groups, block.shards
    payload = b"".join(array.tobytes() for array in arrays)
    if len(payload) > MAX_SNAPSHOT_BLOCK_BYTES:
        raise ValueError(f"a snapshot block has at most {MAX_SNAPSHOT_BLOCK_BYTES} bytes, not {len(payload)}")
    counts = len(block.rows), len(block.hashes), len(block.shards), len(block.groups)
    head = _BLOCK.pack(BLOCK_MAGIC, index, *counts, len(payload), 0)
    return b"".join([head, CHECKSUM.pack(_block_checksum(head, payload)), payload])


def _block_checksum(head: Buffer, payload: bytes) -> int:
    digest = xxhash.xxh3_64(head)
    digest.update(payload)
    return digest.intdigest()


def _blocks(entries: Iterable[Entry]) -> Iterator[SnapshotBlock]:
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += entry_bytes(entry)
        if size >= BLOCK_TARGET_BYTES:
            yield block_of(batch)
            batch, size = [], 0
    if batch:
        yield block_of(batch)
