"""Yesterday's bytes: today's reader reads them, and so does a reader written from docs/format.md alone."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import xxhash
import zstandard
from support.format_values import (
    ENTRIES,
    NAMESPACE,
    NAMESPACE_SPEC,
    RECORDS,
    SHARDS,
    SNAPSHOT_HEADER,
    built,
    snapshot_bytes,
)

from s3kv.format.chunk import read_frame
from s3kv.format.codecs import RAW, Codec
from s3kv.format.header import read_header
from s3kv.format.marker import encode_format, require_format
from s3kv.format.segment import decode_segment, encode_segment
from s3kv.format.snapshot import decode_snapshot
from s3kv.identity.namespace import NamespaceSpec

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "format1"
CODECS = {"chunk-raw.bin": RAW, "chunk-zstd.bin": Codec("zstd")}


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def written() -> dict[str, bytes]:
    """What this release writes. zstd's output may change with its version, so that file is only ever read."""
    chunks = {name: built(codec, 256, 2)[1] for name, codec in CODECS.items()}
    segment = encode_segment(RECORDS, 0xA0B0C0D0, 12, NAMESPACE)
    documents = {"format.json": encode_format(), "namespace.json": NAMESPACE_SPEC.to_json()}
    return {**chunks, **documents, "segment.bin": segment, "snapshot.bin": snapshot_bytes()}


@pytest.mark.parametrize("name", CODECS)
def test_chunks_are_read(name: str) -> None:
    data = golden(name)
    expected, _, pages = built(CODECS[name], 256, 2)
    header = read_header(data, expect_namespace=NAMESPACE, expect_chunk=expected.chunk_id, expect_group=1)
    assert (header.blocks, header.shards, header.start_block) == (expected.blocks, SHARDS, 4)
    assert header.codec_id == expected.codec_id and header.object_bytes == len(data)
    for index, frame in enumerate(header.frames):
        row, column = divmod(index, len(SHARDS))
        out = bytearray(512)
        read_frame(header, row, column, data[frame.offset : frame.offset + frame.length], out)
        assert out == pages[row][column]


def test_segment_is_read() -> None:
    segment = decode_segment(golden("segment.bin"), expect_namespace=NAMESPACE)
    assert (segment.agent, segment.seq, segment.records) == (0xA0B0C0D0, 12, RECORDS)


def test_snapshot_is_read() -> None:
    header, blocks = decode_snapshot(golden("snapshot.bin"), expect_namespace=NAMESPACE)
    assert header == SNAPSHOT_HEADER
    assert tuple(entry for block in blocks for entry in block.entries()) == ENTRIES


def test_json_documents_are_read() -> None:
    require_format(golden("format.json"))
    assert NamespaceSpec.from_json(golden("namespace.json")) == NAMESPACE_SPEC


@pytest.mark.parametrize("name", ["chunk-raw.bin", "segment.bin", "snapshot.bin", "format.json", "namespace.json"])
def test_what_is_written_today_is_the_same_format(name: str) -> None:
    assert written()[name] == golden(name)


# A reader from the tables of docs/format.md, with nothing of s3kv: when it fails, the page and the bytes differ.


def number(data: bytes, offset: int, size: int) -> int:
    return int.from_bytes(data[offset : offset + size], "little")


def sealed(data: bytes) -> bool:
    return number(data, len(data) - 8, 8) == xxhash.xxh3_64_intdigest(data[:-8])


def documented_page(data: bytes, entry: int, element_size: int) -> bytes:
    offset, length, raw_length = number(data, entry, 8), number(data, entry + 8, 4), number(data, entry + 12, 4)
    checksum, codec = number(data, entry + 16, 8), data[entry + 24]
    frame = data[offset : offset + length]
    if codec == 1:
        count, at, page = raw_length // element_size, 8 * element_size, bytearray(raw_length)
        for plane in range(element_size):
            word = number(frame, 8 * plane, 8)
            stored = frame[at : at + word % (1 << 63)]
            page[plane::element_size] = zstandard.decompress(stored, count) if word >> 63 else stored
            at += len(stored)
        assert at == len(frame)
        frame = bytes(page)
    assert len(frame) == raw_length and xxhash.xxh3_64_intdigest(frame) == checksum
    return frame


def test_the_documented_namespace_digest_is_the_real_one() -> None:
    expected = hashlib.blake2b(golden("namespace.json"), digest_size=32, person=b"s3kv namespace").digest()
    assert NAMESPACE_SPEC.digest == expected and NAMESPACE_SPEC.name == expected[:16].hex()


@pytest.mark.parametrize("name", CODECS)
def test_the_documented_chunk_is_the_golden_one(name: str) -> None:
    data = golden(name)
    assert data[:8] == b"S3KVCHK\n" and number(data, 8, 4) == 1
    size, n_blocks, n_shards = number(data, 12, 4), number(data, 84, 4), data[89]
    hashes = 96 + n_shards
    table = hashes + 16 * n_blocks
    assert size == -(-(table + 32 * n_blocks * n_shards + 8) // 64) * 64 and sealed(data[:size])
    name_of = hashlib.blake2b(
        data[64:80] + data[hashes:table], digest_size=16, key=data[16:48], person=b"s3kv chunk 1"
    ).digest()
    assert data[48:64] == name_of
    assert (data[16:48], data[88], tuple(data[96:hashes])) == (NAMESPACE, 1, SHARDS)
    pages = built(RAW, 256, 2)[2]
    entries = range(table, table + 32 * n_blocks * n_shards, 32)
    assert [documented_page(data, entry, data[91]) for entry in entries] == [page for row in pages for page in row]


def test_the_documented_segment_is_the_golden_one() -> None:
    data = golden("segment.bin")
    assert data[:8] == b"S3KVSEG\n" and number(data, 12, 4) == len(data) and sealed(data)
    assert (data[16:48], number(data, 48, 4), number(data, 52, 4)) == (NAMESPACE, 0xA0B0C0D0, 12)
    at, kinds = 60, []
    for _ in range(number(data, 56, 4)):
        kinds.append((data[at], data[at + 8 : at + 24]))
        at += 8 + number(data, at + 4, 4)
    assert at == len(data) - 8
    numbers = {"ChunkAdded": 1, "ChunkDeleted": 2, "Touched": 3}
    assert kinds == [(numbers[type(record).__name__], record.chunk_id) for record in RECORDS]
    added = RECORDS[0]
    fields = struct.unpack_from("<16sQI16sIIBBBx", data, 68)
    assert fields[:5] == (added.chunk_id, *added.stamp, added.parent, added.start_block)
    assert fields[5:] == (2, 1, 3, 2)
    groups = 68 + 56 + 3
    assert struct.unpack_from("<QIQI", data, groups) == (*added.groups[0], *added.groups[1])
    assert data[groups + 24 : groups + 56] == b"".join(added.blocks)


def test_the_documented_snapshot_is_the_golden_one() -> None:
    data = golden("snapshot.bin")
    head = number(data, 12, 4)
    assert data[:8] == b"S3KVSNP\n" and sealed(data[:head]) and number(data, 72, 4) == 1
    magic, index, rows, hashes, shards, groups, size, _ = struct.unpack_from("<4s7I", data, head)
    payload = data[head + 40 : head + 40 + size]
    assert (magic, index, size) == (b"BLK\n", 0, 64 * rows + 16 * hashes + 12 * groups + shards)
    checksum = xxhash.xxh3_64_intdigest(data[head : head + 32] + payload)
    assert number(data, head + 32, 8) == checksum
    assert [payload[64 * row : 64 * row + 16] for row in range(rows)] == [e.record.chunk_id for e in ENTRIES]
    assert [number(payload, 64 * row + 28, 4) for row in range(rows)] == [entry.hour for entry in ENTRIES]
    end = data[head + 40 + size :]
    assert len(end) == 40 and sealed(end)
    chain = xxhash.xxh3_64_intdigest(data[head - 8 : head] + data[head + 32 : head + 40])
    assert struct.unpack("<4sIQQQ", end[:-8]) == (b"END\n", 1, rows, hashes, chain)
