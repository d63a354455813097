"""Chunk objects: headers, frames and who may read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.format_values import NAMESPACE, SHARDS, block_hash, built, chunk_content, shard_sets

from s3kv.errors import CorruptData
from s3kv.format import header as chunk_header
from s3kv.format.chunk import assemble_chunk, build_chunk, check_page, encode_page, read_frame
from s3kv.format.codecs import RAW, Codec

ZSTD = Codec("zstd")


@given(
    n_blocks=st.integers(1, 5),
    shards=shard_sets,
    element_size=st.sampled_from([1, 2, 4]),
    codec=st.sampled_from([RAW, ZSTD, Codec("auto", 3)]),
    data=st.data(),
)
def test_every_block_is_read_back_by_its_own_range(
    n_blocks: int, shards: tuple[int, ...], element_size: int, codec: Codec, data: st.DataObject
) -> None:
    content = chunk_content(n_blocks, element_size=element_size, shards=shards)
    page = st.one_of(st.binary(max_size=70), st.integers(0, 999).map(lambda count: b"\x3f" * count))
    pages = [[data.draw(page) for _ in shards] for _ in range(n_blocks)]
    header, parts = build_chunk(content, pages, codec)
    stored = b"".join(parts)
    assert len(stored) == header.object_bytes
    prefix = stored[: chunk_header.FIXED_HEADER_BYTES]
    assert (
        chunk_header.header_bytes_of(prefix) == header.header_bytes == chunk_header.header_size(n_blocks, len(shards))
    )
    assert chunk_header.read_header(stored) == header
    for block in range(n_blocks):
        for at in range(len(shards)):
            frame = header.frame(block, at)
            out = bytearray(len(pages[block][at]))
            read_frame(header, block, at, stored[frame.offset : frame.offset + frame.length], out)
            assert out == pages[block][at]


def test_raw_pages_are_borrowed_not_copied() -> None:
    pages = [[bytearray(b"ab" * 50) for _ in SHARDS] for _ in range(3)]
    header, parts = build_chunk(chunk_content(), pages, RAW)
    pages[2][1][:2] = b"XY"
    assert bytes(parts[1 + 2 * 3 + 1])[:2] == b"XY"
    with pytest.raises(CorruptData, match="checksum"):
        check_page(header, 2, 1, pages[2][1])
    check_page(header, 2, 0, pages[2][0])


def test_a_span_of_blocks_is_one_range() -> None:
    header, stored, pages = built(RAW)
    offset, length = header.span(1, 2)
    assert stored[offset : offset + length] == b"".join(page for row in pages[1:3] for page in row)
    with pytest.raises(IndexError):
        header.span(1, 3)


def test_case_17_forged_object_under_the_right_key_is_refused() -> None:
    header, stored, _ = built(RAW)
    expected = {"expect_namespace": NAMESPACE, "expect_chunk": header.chunk_id, "expect_group": 1}
    assert chunk_header.read_header(stored, **expected) == header
    foreign = [
        replace(header, namespace_digest=bytes(32)),
        replace(header, layer_group=2),
        replace(header, blocks=(*header.blocks[:2], block_hash(99))),
        replace(header, parent=block_hash(98)),
    ]
    for other in foreign:  # each is whole and has a right checksum; it only is not what the key promises
        forged = chunk_header.encode_header(other)
        assert chunk_header.read_header(forged) == other
        with pytest.raises(CorruptData, match="another"):
            chunk_header.read_header(forged, **expected)


def test_case_17_a_header_cannot_claim_an_id_that_its_blocks_do_not_have() -> None:
    header, stored, _ = built(RAW)
    honest = bytearray(stored[: header.header_bytes - 8])
    honest[48:64] = block_hash(1)
    with pytest.raises(CorruptData, match="not that of the blocks"):
        chunk_header.read_header(chunk_header.seal(bytes(honest)), expect_chunk=block_hash(1))


def test_chunk_ids_depend_on_namespace_parent_and_every_block() -> None:
    blocks = [block_hash(1), block_hash(2)]
    made = {
        chunk_header.chunk_id(NAMESPACE, bytes(16), blocks),
        chunk_header.chunk_id(bytes(32), bytes(16), blocks),
        chunk_header.chunk_id(NAMESPACE, block_hash(1), blocks),
        chunk_header.chunk_id(NAMESPACE, bytes(16), blocks[::-1]),
        chunk_header.chunk_id(NAMESPACE, bytes(16), blocks[:1]),
    }
    assert len(made) == 5 and all(len(value) == 16 for value in made)


def test_a_frame_or_buffer_of_another_length_is_refused() -> None:
    header, stored, pages = built(RAW)
    frame = header.frame(0, 0)
    data = stored[frame.offset : frame.offset + frame.length]
    for wrong, out in ((data[:-1], bytearray(128)), (data + b"x", bytearray(128)), (data, bytearray(127))):
        with pytest.raises(CorruptData, match="length"):
            read_frame(header, 0, 0, wrong, out)
    assert len(pages[0][0]) == 128


def test_what_does_not_fit_together_is_not_written() -> None:
    content = chunk_content()
    with pytest.raises(ValueError, match="one page per block and shard"):
        build_chunk(content, [[b"x"]] * 3, RAW)
    with pytest.raises(ValueError, match="number of frames"):
        assemble_chunk(content, [encode_page(b"xx", RAW, 2)])
    with pytest.raises(ValueError, match="number of blocks"):
        assemble_chunk(replace(content, blocks=()), [])
    header = built(RAW)[0]
    for wrong in ({"frames": header.frames[::-1]}, {"codec_id": 1}, {"layer_group": 64}, {"element_size": 0}):
        with pytest.raises(ValueError, match="outside the limits"):
            replace(header, **wrong)
