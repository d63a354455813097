"""How a page becomes a frame and back: `raw`, and `zstd` over byte planes.

KV elements are floats whose high bytes (sign and exponent) repeat and whose low bytes are noise. A page of n-byte
elements is cut into n planes, plane i holding byte i of every element, and only the planes that shrink are compressed
(measured on bf16: high plane 2.1 : 1, low plane 1.00 : 1). A page of which no plane shrinks is stored raw.

A raw frame is the page's own bytes, so a range request reads straight into a slot. A plane frame begins with one u64
per plane: the plane's stored length in the low 63 bits, and in the top bit whether it is a zstd frame.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from struct import Struct, unpack_from
from typing import Any, Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from s3kv.errors import CorruptData
from s3kv.format.header import CODEC_RAW, CODEC_ZSTD_PLANES
from s3kv.format.limits import MAX_ELEMENT_SIZE, MAX_PAGE_BYTES
from s3kv.format.wire import Buffer, flat, need

_PLANE = Struct("<Q")
_WORD = np.dtype("<u2")
_COMPRESSED = 1 << 63
_LENGTH = _COMPRESSED - 1

SAMPLE_SHARE, SAMPLE_MIN_BYTES = 32, 1024  # of a plane, from its middle
PLANE_MIN_GAIN = 0.05  # of a plane: below this the time to decompress costs more than the bytes
AUTO_MIN_GAIN = 0.10  # of a page: below this `auto` stores raw

_MAX_WINDOW_BYTES = 128 << 20  # the zstd library's own default limit
_contexts = threading.local()  # zstd contexts are expensive to make and belong to one thread at a time

ByteArray = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Codec:
    """How pages are to be stored. `auto`: zstd for pages that shrink by AUTO_MIN_GAIN, else raw."""

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
    buffers = _encode_planes(view, element_size, codec.level)
    most = len(view) * (1 - AUTO_MIN_GAIN) if codec.name == "auto" else len(view) - 1
    if sum(map(len, buffers)) > most:
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


def _encode_planes(view: memoryview, element_size: int, level: int) -> list[Buffer]:
    """Planes that shrink by PLANE_MIN_GAIN are compressed.

    The last one, sign and exponent of a float, mostly does and is compressed without asking; the others are tried only
    when a small sample says that they may.
    """
    head = bytearray()
    buffers: list[Buffer] = [head]
    compress = _compressor(level).compress
    for index, each in enumerate(_split(view, element_size), 1):
        plane = each.data
        most = len(plane) * (1 - PLANE_MIN_GAIN)
        if (index == element_size or _may_shrink(plane, compress)) and len(packed := compress(plane)) <= most:
            head += _PLANE.pack(len(packed) | _COMPRESSED)
            buffers.append(packed)
        else:
            head += _PLANE.pack(len(plane))
            buffers.append(plane)
    return buffers


def _split(view: memoryview, element_size: int) -> Iterator[ByteArray]:
    """The planes. Two are cut with whole-word operations: bytes at a stride take twice the time (numpy 2, measured)."""
    if element_size == _WORD.itemsize:
        words = np.frombuffer(view, _WORD)
        yield words.astype(np.uint8)
        yield (words >> 8).astype(np.uint8)
    else:
        elements = np.frombuffer(view, np.uint8).reshape(-1, element_size)
        for index in range(element_size):
            yield np.ascontiguousarray(elements[:, index])


def _join(planes: Iterator[ByteArray], element_size: int, target: memoryview) -> None:
    """The other way round, into `target`."""
    if element_size == _WORD.itemsize:
        low, high = planes
        words = np.frombuffer(target, _WORD)
        words[:] = high
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, low, out=words)
    else:
        elements = np.frombuffer(target, np.uint8).reshape(-1, element_size)
        for index, plane in enumerate(planes):
            elements[:, index] = plane


def _may_shrink(plane: memoryview, compress: Callable[[memoryview], bytes]) -> bool:
    """Of a sample so small, frame and tables are some per cent: any gain at all counts."""
    size = min(max(SAMPLE_MIN_BYTES, len(plane) // SAMPLE_SHARE), len(plane))
    start = (len(plane) - size) // 2
    return len(compress(plane[start : start + size])) < size


def _decode_planes(source: memoryview, element_size: int, target: memoryview) -> None:
    need(1 <= element_size <= MAX_ELEMENT_SIZE, "element size is outside the limits of the format")
    need(0 < len(target) <= MAX_PAGE_BYTES and len(target) % element_size == 0, "page is no whole number of elements")
    head = _PLANE.size * element_size
    need(len(source) >= head, "plane frame ends early")
    entries = unpack_from(f"<{element_size}Q", source)
    need(head + sum([entry & _LENGTH for entry in entries]) == len(source), "plane frame has a wrong length")
    _join(_planes(source[head:], entries, len(target) // element_size), element_size, target)


def _planes(stored: memoryview, entries: Sequence[int], count: int) -> Iterator[ByteArray]:
    """Each of `count` bytes, decompressed when its turn comes."""
    position = 0
    for entry in entries:
        end = position + (entry & _LENGTH)
        plane: Buffer = stored[position:end]
        if entry & _COMPRESSED:
            plane = _decompress(plane, count)
        need(len(plane) == count, "plane has a wrong length")
        yield np.frombuffer(plane, np.uint8)
        position = end


def _decompress(stored: Buffer, expected: int) -> bytes:
    try:
        # The library allocates what the zstd frame says that it holds, so that is looked at first.
        declared = zstandard.frame_content_size(stored)
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
