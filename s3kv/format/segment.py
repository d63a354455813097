"""A catalog segment: records of one agent, one small object of the log. Layout: `docs/format.md`, "Catalog segment"."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

from s3kv.errors import CorruptData
from s3kv.format.limits import (
    DIGEST_BYTES,
    FORMAT,
    ID_BYTES,
    MAX_BLOCKS,
    MAX_GROUPS,
    MAX_SEGMENT_BYTES,
    MAX_SEGMENT_RECORDS,
    MAX_SHARDS,
    U32,
)
from s3kv.format.records import ChunkAdded, ChunkDeleted, GroupObject, Record, Stamp, Touched, delete_reason
from s3kv.format.wire import Buffer, Cursor, flat, need, seal, unseal

MAGIC = b"S3KVSEG\n"

_HEADER = Struct("<8sII32sIII")  # magic, format, bytes of all, namespace digest, agent, seq, records
_RECORD = Struct("<B3xI")  # kind, bytes of the body
_ADDED = Struct("<16sQI16sIIBBBx")  # chunk id, stamp, parent, start block, blocks, codec, shards, groups
_GROUP = Struct("<QI")  # size, header size
_DELETED = Struct("<16sQIB3x")  # chunk id, stamp, reason
_TOUCHED = Struct("<16sI")  # chunk id, hour

KIND_ADDED, KIND_DELETED, KIND_TOUCHED = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Segment:
    """A decoded segment. `skipped` counts records of kinds that this release does not know."""

    namespace_digest: bytes
    agent: int
    seq: int
    records: tuple[Record, ...]
    skipped: int = 0


def encode_segment(records: Iterable[Record], agent: int, seq: int, namespace_digest: bytes) -> bytes:
    """The bytes of one segment. ValueError when it exceeds MAX_SEGMENT_RECORDS or MAX_SEGMENT_BYTES: split it."""
    if len(namespace_digest) != DIGEST_BYTES or not (0 <= agent <= U32 and 0 <= seq <= U32):
        raise ValueError("namespace digest, agent or seq is outside the limits of the format")
    bodies = [_encode_record(record) for record in records]
    size = _HEADER.size + sum(map(len, bodies)) + 8
    if len(bodies) > MAX_SEGMENT_RECORDS or size > MAX_SEGMENT_BYTES:
        raise ValueError(f"a segment of {len(bodies)} records and {size} bytes exceeds the limits of the format")
    header = _HEADER.pack(MAGIC, FORMAT, size, namespace_digest, agent, seq, len(bodies))
    return seal(b"".join([header, *bodies]))


def record_bytes(record: Record) -> int:
    """How many bytes `record` takes in a segment; an empty segment has SEGMENT_OVERHEAD_BYTES."""
    if isinstance(record, ChunkAdded):
        lists = len(record.shards) + _GROUP.size * len(record.groups) + ID_BYTES * len(record.blocks)
        return _RECORD.size + _ADDED.size + lists
    return _RECORD.size + (_DELETED.size if isinstance(record, ChunkDeleted) else _TOUCHED.size)


SEGMENT_OVERHEAD_BYTES = _HEADER.size + 8


def decode_segment(data: Buffer, *, expect_namespace: bytes | None = None) -> Segment:
    """The segment in `data` (all of the object). CorruptData when a byte, a length or the namespace is not right."""
    view = flat(data)
    need(len(view) <= MAX_SEGMENT_BYTES, "segment is larger than the format allows")
    cursor = Cursor(view, "segment")
    magic, version, size, namespace, agent, seq, count = cursor.unpack(_HEADER)
    need(magic == MAGIC, "not a catalog segment")
    need(version == FORMAT, f"segment has format {version}, not {FORMAT}")
    need(size == len(view), "segment has a wrong length")
    body = Cursor(unseal(view, "segment")[_HEADER.size :], "segment")
    need(count <= MAX_SEGMENT_RECORDS, "segment has too many records")
    need(expect_namespace is None or namespace == expect_namespace, "segment belongs to another namespace")
    records = [_decode_record(body) for _ in range(count)]
    need(body.left == 0, "segment has bytes after its last record")
    known = tuple(record for record in records if record is not None)
    return Segment(namespace, agent, seq, known, count - len(known))


def _encode_record(record: Record) -> bytes:
    if isinstance(record, ChunkAdded):
        kind, body = KIND_ADDED, _encode_added(record)
    elif isinstance(record, ChunkDeleted):
        kind, body = KIND_DELETED, _DELETED.pack(record.chunk_id, *record.stamp, record.reason)
    else:
        kind, body = KIND_TOUCHED, _TOUCHED.pack(record.chunk_id, record.hour)
    return _RECORD.pack(kind, len(body)) + body


def _encode_added(record: ChunkAdded) -> bytes:
    counts = len(record.blocks), record.codec_id, len(record.shards), len(record.groups)
    fixed = _ADDED.pack(record.chunk_id, *record.stamp, record.parent, record.start_block, *counts)
    groups = (_GROUP.pack(*group) for group in record.groups)
    return b"".join([fixed, bytes(record.shards), *groups, *record.blocks])


def _decode_record(cursor: Cursor) -> Record | None:
    kind, size = cursor.unpack(_RECORD)
    body = Cursor(cursor.take(size), "record")
    try:
        record = _decode_body(kind, body)
    except ValueError as error:  # the record types refuse values outside the limits
        raise CorruptData(f"record: {error}") from error
    # A later minor release may only add kinds: a known kind has exactly the bytes that it has today.
    need(record is None or body.left == 0, "record has bytes after its end")
    return record


def _decode_body(kind: int, body: Cursor) -> Record | None:
    if kind == KIND_ADDED:
        return _decode_added(body)
    if kind == KIND_DELETED:
        chunk_id, time_us, agent, reason = body.unpack(_DELETED)
        return ChunkDeleted(chunk_id, Stamp(time_us, agent), delete_reason(reason))
    if kind == KIND_TOUCHED:
        return Touched(*body.unpack(_TOUCHED))
    return None


def _decode_added(body: Cursor) -> ChunkAdded:
    chunk_id, time_us, agent, parent, start, n_blocks, codec, n_shards, n_groups = body.unpack(_ADDED)
    need(n_blocks <= MAX_BLOCKS and n_shards <= MAX_SHARDS and n_groups <= MAX_GROUPS, "record has too many parts")
    shards = tuple(body.take(n_shards))
    groups = tuple(GroupObject(*pair) for pair in _GROUP.iter_unpack(body.take(n_groups * _GROUP.size)))
    hashes = bytes(body.take(n_blocks * ID_BYTES))
    blocks = tuple(hashes[at : at + ID_BYTES] for at in range(0, len(hashes), ID_BYTES))
    return ChunkAdded(chunk_id, Stamp(time_us, agent), parent, start, blocks, codec, shards, groups)
