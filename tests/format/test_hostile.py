"""Damaged and hostile bytes: CorruptData or the very same value; never another exception, never unchecked memory."""

from __future__ import annotations

import importlib.util
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from struct import pack

import pytest
from support.format_targets import TARGETS, sealed_segment, sealed_snapshot
from support.format_values import NAMESPACE, RECORDS, built, snapshot_bytes

from s3kv.errors import ConfigError, CorruptData
from s3kv.format import marker
from s3kv.format.chunk import read_frame
from s3kv.format.codecs import RAW, Codec
from s3kv.format.header import encode_header, read_header
from s3kv.format.segment import decode_segment, encode_segment
from s3kv.format.snapshot import SnapshotReader, decode_snapshot

Decode = Callable[[bytes], object]


def decode_snapshot_values(data: bytes) -> object:
    header, blocks = decode_snapshot(data)
    return header, [entry for block in blocks for entry in block.entries()]


def frame_decoder(codec: Codec) -> tuple[Decode, bytes]:
    header, stored, _ = built(codec, 48, 1)
    frame = header.frame(0, 0)

    def decode(data: bytes) -> object:
        out = bytearray(frame.raw_length)
        read_frame(header, 0, 0, data, out)
        return bytes(out)

    return decode, stored[frame.offset : frame.offset + frame.length]


KINDS: dict[str, tuple[Decode, bytes]] = {
    "header": (read_header, encode_header(built(RAW)[0])),
    "segment": (decode_segment, encode_segment(RECORDS, 7, 1, NAMESPACE)),
    "snapshot": (decode_snapshot_values, snapshot_bytes()),
    "raw frame": frame_decoder(RAW),
    "plane frame": frame_decoder(Codec("zstd")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_at_every_byte_is_noticed(kind: str) -> None:
    decode, data = KINDS[kind]
    for length in range(len(data)):
        with pytest.raises(CorruptData):
            decode(data[:length])


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_noticed_or_without_effect(kind: str) -> None:
    decode, data = KINDS[kind]
    good = decode(data)
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            try:
                assert decode(bytes(flipped)) == good
            except CorruptData:
                continue


@pytest.mark.parametrize("kind", ["segment", "snapshot"])
def test_bytes_after_the_end_are_refused(kind: str) -> None:
    decode, data = KINDS[kind]
    with pytest.raises(CorruptData):
        decode(data + b"\0")


SNAPSHOT_HEAD = snapshot_bytes()[:104]

HOSTILE_LENGTHS = [
    ("header", b"S3KVCHK\n" + pack("<II", 1, 0xFFFFFFC0) + bytes(68) + pack("<I", 0xFFFFFFFF) + b"\xff" * 8),
    ("segment", sealed_segment(b"S3KVSEG\n" + pack("<II", 1, 0) + bytes(40) + pack("<I", 0xFFFFFFFF) + bytes(8))),
    ("segment", sealed_segment(b"S3KVSEG\n" + pack("<II", 1, 0) + bytes(40) + pack("<IBI", 1, 1, 1 << 31) + bytes(99))),
    ("snapshot", b"S3KVSNP\n" + pack("<II", 1, 0xFFFFFFFF) + bytes(56) + pack("<I", 0xFFFFFFFF) + bytes(40)),
    (
        "snapshot",
        sealed_snapshot(SNAPSHOT_HEAD + pack("<4s7I", b"BLK\n", 0, *[0xFFFFFFFF] * 5, 0) + bytes(16)),
    ),
]


@pytest.mark.parametrize(("kind", "data"), HOSTILE_LENGTHS)
def test_lengths_are_checked_before_memory_is_taken(kind: str, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData):
            KINDS[kind][0](data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_snapshot_reader_holds_one_block_at_most() -> None:
    reader = SnapshotReader()
    reader.feed(SNAPSHOT_HEAD)
    with pytest.raises(CorruptData, match="larger than the format allows"):
        reader.feed(pack("<4s7IQ", b"BLK\n", 0, 1, 1, 1, 1, (4 << 20) + 1, 0, 0))


def test_the_fuzz_targets_hold_on_mutated_valid_bytes() -> None:
    spec = importlib.util.spec_from_file_location("fuzz_formats", Path(__file__).parent / "fuzz_formats.py")
    assert spec is not None and spec.loader is not None
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    assert fuzz.run_seeded(600, seed=20261129) == 600 * len(TARGETS)


def test_format_marker() -> None:
    assert marker.read_format(marker.encode_format()) == 1
    marker.require_format(marker.encode_format())
    marker.require_format(b'{"kind":"s3kv", "format":1, "later":[]}')
    for wrong in (
        b"",
        b"1",
        b"[]",
        b"\xff",
        b"[" * 4000,
        b'{"format":1}',
        b'{"kind":"s3kv","format":true}',
        bytes(5000),
    ):
        with pytest.raises(CorruptData):
            marker.read_format(wrong)
        with pytest.raises(ConfigError, match=r"store\.url"):
            marker.require_format(wrong)
    with pytest.raises(ConfigError, match="format 2"):
        marker.require_format(b'{"kind":"s3kv","format":2}')
