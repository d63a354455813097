"""Codecs: lossless, small where there is something to gain, and bounded whatever they are given."""

from __future__ import annotations

import threading
import tracemalloc
from struct import pack

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support.format_values import bf16_page, noise

from s3kv.errors import CorruptData
from s3kv.format.codecs import RAW, Codec, decode_block, encode_block
from s3kv.format.header import CODEC_RAW, CODEC_ZSTD_PLANES

ZSTD, AUTO = Codec("zstd"), Codec("auto")


def normal_bf16(elements: int) -> bytes:
    values = np.random.default_rng(1).normal(size=elements).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@given(
    st.sampled_from([RAW, ZSTD, AUTO]),
    st.integers(1, 8),
    st.one_of(st.binary(max_size=400), st.integers(0, 3000).map(lambda seed: bf16_page(seed, seed))),
)
def test_round_trip(codec: Codec, element_size: int, page: bytes) -> None:
    codec_id, buffers = encode_block(page, codec, element_size)
    frame = b"".join(buffers)
    assert len(frame) <= len(page)
    out = bytearray(len(page))
    decode_block(frame, codec_id, element_size, out)
    assert out == page


@pytest.mark.parametrize("element_size", [1, 2, 4])
def test_pages_may_lie_at_odd_addresses(element_size: int) -> None:
    page = bf16_page(4096, 3)
    whole = bytearray(1) + page
    codec_id, buffers = encode_block(memoryview(whole)[1:], ZSTD, element_size)
    out = bytearray(1 + len(page))
    decode_block(b"".join(buffers), codec_id, element_size, memoryview(out)[1:])
    assert out[1:] == page and out[0] == 0


def test_only_the_plane_that_shrinks_is_compressed() -> None:
    page = normal_bf16(1 << 16)
    codec_id, buffers = encode_block(page, ZSTD, 2)
    assert codec_id == CODEC_ZSTD_PLANES
    low, high = (int.from_bytes(bytes(buffers[0])[at : at + 8], "little") for at in (0, 8))
    assert low == 1 << 16 and bytes(buffers[1]) == page[0::2]
    assert high >> 63 == 1 and high & ~(1 << 63) == len(buffers[2]) < 0.55 * (1 << 16)


def test_auto_stores_raw_unless_the_page_shrinks_enough() -> None:
    assert encode_block(normal_bf16(1 << 15), AUTO, 2)[0] == CODEC_ZSTD_PLANES
    assert encode_block(noise(1 << 16, 1), AUTO, 2)[0] == CODEC_RAW
    assert encode_block(noise(1 << 16, 1), ZSTD, 2)[0] == CODEC_RAW
    # One plane of eight gains half: a sixteenth of the page, so zstd takes it and auto does not.
    planes = [noise(1 << 12, at) for at in range(7)] + [bytes(byte & 15 for byte in noise(1 << 12, 7))]
    page = np.stack([np.frombuffer(plane, np.uint8) for plane in planes], axis=1).tobytes()
    assert (encode_block(page, ZSTD, 8)[0], encode_block(page, AUTO, 8)[0]) == (CODEC_ZSTD_PLANES, CODEC_RAW)


def test_a_page_that_is_no_whole_number_of_elements_is_stored_raw() -> None:
    assert encode_block(bytes(1001), ZSTD, 2)[0] == CODEC_RAW


def test_threads_do_not_share_contexts() -> None:
    pages = [normal_bf16(1 << 14), bf16_page(1 << 14, 2)]
    failures: list[BaseException] = []

    def work(page: bytes) -> None:
        try:
            for _ in range(20):
                codec_id, buffers = encode_block(page, ZSTD, 2)
                out = bytearray(len(page))
                decode_block(b"".join(buffers), codec_id, 2, out)
                assert out == page
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(pages[at % 2],)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def plane_frame(*planes: tuple[bytes, bool]) -> bytes:
    head = b"".join(pack("<Q", len(plane) | (compressed << 63)) for plane, compressed in planes)
    return head + b"".join(plane for plane, _ in planes)


def bomb(size: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(size))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        plane_frame((bytes(50), False))[:-1],
        plane_frame((bytes(49), False)),
        plane_frame((bytes(51), False)),
        plane_frame((bomb(49), True)),
        plane_frame((bomb(1 << 28), True)),
        plane_frame((bomb(50)[:-1], True)),
        plane_frame((bomb(50) + b"x", True)),
        plane_frame((bomb(25) + bomb(25), True)),
        plane_frame((zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50)), True)),
        plane_frame((b"\x50\x2a\x4d\x18\x32\x00\x00\x00" + bytes(50), True)),
        plane_frame((b"", True)),
        pack("<Q", (1 << 63) - 1),
        pack("<Q", (1 << 64) - 1) + bytes(50),
    ],
)
def test_hostile_plane_frames_are_refused_without_their_memory(frame: bytes) -> None:
    out = bytearray(50)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData):
            decode_block(frame, CODEC_ZSTD_PLANES, 1, out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("codec", "element_size", "length"), [(2, 1, 8), (1, 0, 8), (1, 9, 9), (1, 3, 8), (1, 1, 0)])
def test_impossible_codecs_and_element_sizes_are_refused(codec: int, element_size: int, length: int) -> None:
    with pytest.raises(CorruptData):
        decode_block(bytes(80), codec, element_size, bytearray(length))
