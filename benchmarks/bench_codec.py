"""The codec on bf16 KV, real and synthetic, against zstd alone on the same bytes and against the sum of its parts.

One core: everything here runs in one thread. The parts of an encode are cutting the planes, zstd on the plane that
shrinks, and the checksum; of a decode, zstd on that plane, joining the planes, and the checksum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard

from benchmarks.harness import MIB, Options, Report, Series, at_least, race, ratio
from benchmarks.kv import real_pages, synthetic_pages
from s3kv.format.chunk import ChunkContent, assemble_chunk, encode_page, read_frame
from s3kv.format.codecs import Codec
from s3kv.format.wire import checksum

ELEMENT = 2
CODEC = Codec("zstd", 1)


def measure(options: Options) -> Report:
    report = Report("codec: zstd over byte planes of bf16 KV, one core")
    count = 4 if options.quick else 16
    sets = {
        "real KV, 512 KiB pages": real_pages(256 if options.quick else 1024)[: 2 * count],
        "synthetic, 2 MiB pages": synthetic_pages(count // 2, 2 * MIB),
        "synthetic, 64 KiB pages": synthetic_pages(8 * count, 64 << 10),
    }
    for name, pages in sets.items():
        _measure(report, name, pages, options.rounds(20))
    return report


def _measure(report: Report, name: str, pages: Sequence[bytes], rounds: int) -> None:
    total = sum(map(len, pages))
    plain = zstandard.ZstdCompressor(level=1)
    encoded = [encode_page(page, CODEC, ELEMENT) for page in pages]
    ids = tuple(bytes([number % 256, number // 256]) + bytes(14) for number in range(len(pages)))
    header, _ = assemble_chunk(ChunkContent(bytes(32), 0, bytes(16), 0, (0,), ids, ELEMENT), encoded)
    frames = [b"".join(map(bytes, each.buffers)) for each in encoded]
    out = np.empty(len(pages[0]), np.uint8)

    def decode() -> None:
        for index, frame in enumerate(frames):
            read_frame(header, index, 0, frame, memoryview(out)[: len(pages[index])])

    packed = [plain.compress(page) for page in pages]
    unpack = zstandard.ZstdDecompressor()
    parts = _Parts(pages)
    series = race(
        {
            "encode": lambda: [encode_page(page, CODEC, ELEMENT) for page in pages],
            "encode parts": parts.encode,
            "plain": lambda: [plain.compress(page) for page in pages],
            "decode": decode,
            "decode parts": parts.decode,
            "plain back": lambda: [unpack.decompress(each) for each in packed],
        },
        rounds,
    )
    gained, alone = total / sum(each.length for each in encoded), total / sum(map(len, packed))
    goal = at_least(1.35, "figure")
    report.row(f"{name}: ratio", gained, ": 1", peer="zstd alone", peer_figure=alone, ratio=gained / alone, goal=goal)
    for what, other in (("encode", "plain"), ("decode", "plain back")):
        _speed(report, f"{name}: {what}", series[what], "sum of its parts", series[f"{what} parts"], total, judged=True)
        _speed(report, f"{name}: {what}", series[what], "zstd alone", series[other], total, judged=False)


def _speed(report: Report, name: str, of: Series, peer: str, to: Series, total: int, *, judged: bool) -> None:
    """MB of uncompressed bytes a second of CPU."""
    report.row(
        name, total / 1e6 / of.cpu_s, "MB/s a core", peer=peer, peer_figure=total / 1e6 / to.cpu_s,
        ratio=1 / ratio(of, to, "cpu"), goal=at_least(0.9) if judged else None,
    )  # fmt: skip


class _Parts:
    """The same work by hand, without deciding, checking or framing anything; planes are cut as the codec cuts them."""

    def __init__(self, pages: Sequence[bytes]) -> None:
        self._pages = pages
        self._pack = zstandard.ZstdCompressor(level=1, write_checksum=False)
        self._unpack = zstandard.ZstdDecompressor()
        words = [np.frombuffer(page, "<u2") for page in pages]
        self._low = [each.astype(np.uint8) for each in words]
        self._high = [self._pack.compress((each >> 8).astype(np.uint8).data) for each in words]
        self._out = np.empty(max(map(len, pages)) // ELEMENT, "<u2")

    def encode(self) -> None:
        for page in self._pages:
            words = np.frombuffer(page, "<u2")
            words.astype(np.uint8)
            self._pack.compress((words >> 8).astype(np.uint8).data)
            checksum(page)

    def decode(self) -> None:
        for page, low, high in zip(self._pages, self._low, self._high, strict=True):
            out = self._out[: len(page) // ELEMENT]
            out[:] = np.frombuffer(self._unpack.decompress(high), np.uint8)
            np.left_shift(out, 8, out=out)
            np.bitwise_or(out, low, out=out)
            checksum(out.data)
