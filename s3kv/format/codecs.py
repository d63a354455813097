"""How a page becomes a frame and back: `raw`, and `zstd` over byte planes.

KV elements are floats whose high bytes (sign and exponent) repeat and whose low bytes are noise. A page of n-byte
elements is cut into n planes, plane i holding byte i of every element, and only the planes that shrink are compressed
(measured on bf16: high plane 2.1 : 1, low plane 1.00 : 1). A page of which no plane shrinks is stored raw.

A raw frame is the page's own bytes, so a range request reads straight into a slot. A plane frame begins with one u64
per plane: the plane's stored length in the low 63 bits, and in the top bit whether it is a zstd frame.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from struct import Struct
from typing import Any, Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from s3kv.errors import CorruptData
from s3kv.format.header import CODEC_RAW, CODEC_ZSTD_PLANES
from s3kv.format.limits import MAX_ELEMENT_SIZE, MAX_PAGE_BYTES
from s3kv.format.wire import Buffer, flat, need

_PLANE = Struct("<Q")
_COMPRESSED = 1 << 63

SAMPLE_BYTES = 16 << 10  # of each plane, from three places
PLANE_MIN_GAIN = 0.05  # of a plane: below this the time to decompress costs more than the bytes
AUTO_MIN_GAIN = 0.10  # of a page: below this `auto` stores raw

_MAX_WINDOW_BYTES = 128 << 20  # the zstd library's own default limit
_contexts = threading.local()  # zstd contexts are expensive to make and belong to one thread at a time

ByteArray = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Codec:
    """How pages are to be stored. `auto`: zstd for pages that a sample says shrink by AUTO_MIN_GAIN, else raw."""

    name: Literal["raw", "zstd", "auto"] = "auto"
    level: int = 1


RAW = Codec("raw")


def encode_block(raw: Buffer, codec: Codec, element_size: int) -> tuple[int, list[Buffer]]:
    """(codec id, buffers whose join is the frame) of one page. For `raw` that is a view of `raw` itself, not a copy.

    A page that is no whole number of elements, and one that does not shrink, is stored raw whatever `codec` says.
    """
    view = flat(raw)
    if codec.name == "raw" or not view or len(view) % element_size:
        return CODEC_RAW, [view]
    elements = np.frombuffer(view, np.uint8).reshape(-1, element_size)
    gains = [_sample_gain(elements[:, plane], codec.level) for plane in range(element_size)]
    wanted = [gain >= PLANE_MIN_GAIN for gain in gains]
    if codec.name == "auto" and sum(gains) / element_size < AUTO_MIN_GAIN:
        return CODEC_RAW, [view]
    if not any(wanted):
        return CODEC_RAW, [view]
    buffers = _encode_planes(elements, wanted, codec.level)
    if sum(map(len, buffers)) >= len(view):
        return CODEC_RAW, [view]
    return CODEC_ZSTD_PLANES, buffers


def decode_block(frame: Buffer, codec_id: int, element_size: int, out: Buffer) -> None:
    """Writes the page of `frame` into the writable `out`, all of it, or raises CorruptData (`out` is undefined then).

    Allocates a small multiple of one plane (`len(out) / element_size` bytes), whatever `frame` says of itself.
    """
    source, target = flat(frame), flat(out)
    if codec_id == CODEC_RAW:
        need(len(source) == len(target), "raw frame has a wrong length")
        np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)
    elif codec_id == CODEC_ZSTD_PLANES:
        _decode_planes(source, element_size, target)
    else:
        raise CorruptData(f"frame has unknown codec {codec_id}")


def _encode_planes(elements: ByteArray, wanted: list[bool], level: int) -> list[Buffer]:
    head = bytearray()
    buffers: list[Buffer] = [head]
    for index, compress in enumerate(wanted):
        plane = np.ascontiguousarray(elements[:, index]).data
        packed = _compressor(level).compress(plane) if compress else b""
        if compress and len(packed) < len(plane):
            head += _PLANE.pack(len(packed) | _COMPRESSED)
            buffers.append(packed)
        else:
            head += _PLANE.pack(len(plane))
            buffers.append(plane)
    return buffers


def _sample_gain(plane: ByteArray, level: int) -> float:
    """The share that a sample of the plane shrinks by: 0.5 for 2 : 1."""
    piece = SAMPLE_BYTES // 3
    if len(plane) <= SAMPLE_BYTES:
        sample = np.ascontiguousarray(plane)
    else:
        starts = (0, (len(plane) - piece) // 2, len(plane) - piece)
        sample = np.concatenate([plane[start : start + piece] for start in starts])
    return max(0.0, 1.0 - len(_compressor(level).compress(sample.data)) / len(sample))


def _decode_planes(source: memoryview, element_size: int, target: memoryview) -> None:
    need(1 <= element_size <= MAX_ELEMENT_SIZE, "element size is outside the limits of the format")
    need(0 < len(target) <= MAX_PAGE_BYTES and len(target) % element_size == 0, "page is no whole number of elements")
    head = _PLANE.size * element_size
    need(len(source) >= head, "plane frame ends early")
    entries = [entry for (entry,) in _PLANE.iter_unpack(source[:head])]
    need(head + sum(entry & ~_COMPRESSED for entry in entries) == len(source), "plane frame has a wrong length")
    elements = np.frombuffer(target, np.uint8).reshape(-1, element_size)
    position = head
    for index, entry in enumerate(entries):
        length = entry & ~_COMPRESSED
        stored = source[position : position + length]
        plane = _decompress(stored, len(elements)) if entry & _COMPRESSED else stored
        need(len(plane) == len(elements), "plane has a wrong length")
        elements[:, index] = np.frombuffer(plane, np.uint8)
        position += length


def _decompress(stored: memoryview, expected: int) -> bytes:
    try:
        # The library allocates what the zstd frame says that it holds, so that is looked at first.
        declared = zstandard.get_frame_parameters(stored).content_size
        need(declared == expected, "compressed plane has a wrong length")
        plane: bytes = _decompressor().decompress(stored, allow_extra_data=False)
        return plane
    except zstandard.ZstdError as error:
        raise CorruptData(f"compressed plane: {error}") from error


def _compressor(level: int) -> Any:
    contexts = _contexts.__dict__.setdefault("compressors", {})
    if level not in contexts:
        contexts[level] = zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)
    return contexts[level]


def _decompressor() -> Any:
    if "decompressor" not in _contexts.__dict__:
        _contexts.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    return _contexts.decompressor
