"""What one object of the bucket says of itself, as plain values for people and programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from s3kv.errors import ConfigError, CorruptData
from s3kv.format import keys
from s3kv.format.header import (
    FIXED_HEADER_BYTES,
    HEADER_PROBE_BYTES,
    ChunkHeader,
    header_bytes_of,
    read_header,
)
from s3kv.format.limits import MAX_SEGMENT_BYTES
from s3kv.format.records import ChunkAdded, ChunkDeleted
from s3kv.format.segment import decode_segment
from s3kv.format.snapshot import SnapshotReader
from s3kv.gc.verify import check_frames
from s3kv.identity.namespace import MAX_JSON_BYTES
from s3kv.store import Store

CODEC_NAMES = {0: "raw", 1: "zstd planes"}
_SNAPSHOT_STEP = 8 << 20


@dataclass(frozen=True, slots=True)
class Inspection:
    """`facts` in the order in which they are shown, `rows` a table under them (all with the same names)."""

    kind: str
    key: str
    size: int
    facts: dict[str, Any]
    rows: list[dict[str, Any]]
    problem: str = ""


async def inspect_key(store: Store, key: str, *, check: bool = True) -> Inspection:
    """Reads and, for a chunk with `check`, verifies every frame. Raises NotFound and other errors of the store.

    What is damaged is in `problem`; ConfigError for a key that is not one of format 1.
    """
    size = (await store.head(key)).size
    try:
        return await _inspect(store, key, size, check)
    except CorruptData as error:
        return Inspection("damaged", key, size, {}, [], str(error))


async def _inspect(store: Store, key: str, size: int, check: bool) -> Inspection:
    if (chunk := keys.parse_chunk_key(key)) is not None:
        return await _inspect_chunk(store, key, size, chunk, check)
    if keys.parse_log_key(key) is not None:
        return _segment(key, size, await store.get(key, MAX_SEGMENT_BYTES))
    if keys.parse_snap_key(key) is not None:
        return await _snapshot(store, key, size)
    if key == keys.FORMAT_KEY or keys.parse_namespace_key(key) or keys.parse_lease_key(key):
        return _document(key, size, await store.get(key, MAX_JSON_BYTES))
    raise ConfigError(f"{key} is not a key of s3kv: give a key as s3kv ls shows it, or a chunk id")


async def read_chunk_header(store: Store, key: str, size: int) -> ChunkHeader:
    """The header, in one request for nearly every chunk. Raises CorruptData, NotFound."""
    chunk = keys.parse_chunk_key(key)
    if chunk is None:
        raise CorruptData(f"{key} is no key of a chunk")
    buffer = bytearray(min(size, HEADER_PROBE_BYTES))
    await store.get_into(key, memoryview(buffer))
    needed = header_bytes_of(buffer[:FIXED_HEADER_BYTES])
    if needed > size:
        raise CorruptData("chunk header ends early")
    if needed > len(buffer):
        rest = bytearray(needed - len(buffer))
        await store.get_into(key, memoryview(rest), len(buffer))
        buffer += rest
    return read_header(buffer, expect_chunk=chunk.chunk_id, expect_group=chunk.group)


async def _inspect_chunk(store: Store, key: str, size: int, chunk: keys.ChunkKey, check: bool) -> Inspection:
    header = await read_chunk_header(store, key, size)
    problem = (
        "" if header.object_bytes == size else f"the object has {size} bytes, its header says {header.object_bytes}"
    )
    if check and not problem:
        try:
            await check_frames(header, lambda offset, out: store.get_into(key, out, offset))
        except CorruptData as error:
            problem = str(error)
    raw = sum(frame.raw_length for frame in header.frames)
    stored = sum(frame.length for frame in header.frames)
    facts = {
        "namespace": header.namespace_digest[:16].hex(),
        "chunk": header.chunk_id.hex(),
        "layer group": header.layer_group,
        "parent": header.parent.hex(),
        "first block": header.start_block,
        "blocks": len(header.blocks),
        "shards": list(header.shards),
        "codec": CODEC_NAMES.get(header.codec_id, header.codec_id),
        "element size": header.element_size,
        "header bytes": header.header_bytes,
        "frame bytes": stored,
        "page bytes": raw,
        "ratio": round(raw / stored, 3) if stored else None,
        "frames": "every checksum is right" if check and not problem else "not checked" if not check else "BAD",
    }
    return Inspection("chunk", key, size, facts, list(_frame_rows(header)), problem)


def _frame_rows(header: ChunkHeader) -> Any:
    for index, block in enumerate(header.blocks):
        for place, shard in enumerate(header.shards):
            frame = header.frame(index, place)
            yield {
                "block": header.start_block + index,
                "hash": block.hex(),
                "shard": shard,
                "offset": frame.offset,
                "length": frame.length,
                "page": frame.raw_length,
                "codec": CODEC_NAMES.get(frame.codec, frame.codec),
                "xxh3": f"{frame.checksum:016x}",
            }


def _segment(key: str, size: int, data: bytes) -> Inspection:
    segment = decode_segment(data)
    facts = {
        "agent": f"{segment.agent:08x}",
        "seq": segment.seq,
        "records": len(segment.records),
        "skipped": segment.skipped,
    }
    return Inspection("catalog segment", key, size, facts, [_record_row(record) for record in segment.records])


def _record_row(record: Any) -> dict[str, Any]:
    row = {"record": "touched", "chunk": record.chunk_id.hex(), "time": "", "what": ""}
    if isinstance(record, ChunkAdded):
        what = f"{len(record.blocks)} blocks from {record.start_block}, {record.size} bytes"
        return row | {"record": "added", "time": record.stamp.time_us / 1e6, "what": what}
    if isinstance(record, ChunkDeleted):
        return row | {"record": "deleted", "time": record.stamp.time_us / 1e6, "what": record.reason.name.lower()}
    return row | {"time": record.hour * 3600.0}


async def _snapshot(store: Store, key: str, size: int) -> Inspection:
    reader = SnapshotReader()
    for offset in range(0, size, _SNAPSHOT_STEP):
        piece = bytearray(min(_SNAPSHOT_STEP, size - offset))
        await store.get_into(key, memoryview(piece), offset)
        reader.feed(piece)
    header = reader.close()
    facts = {
        "made": header.time_us / 1e6,
        "epoch": header.epoch,
        "folds segments before": header.horizon_us / 1e6,
        "further segments": len(header.covers),
        "chunks": reader.rows,
        "blocks": reader.hashes,
    }
    return Inspection("catalog snapshot", key, size, facts, [])


def _document(key: str, size: int, data: bytes) -> Inspection:
    try:
        loaded = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{key} is not JSON") from error
    return Inspection("document", key, size, loaded if isinstance(loaded, dict) else {"value": loaded}, [])
