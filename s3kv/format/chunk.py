"""Whole chunk objects: from pages to the parts of one PUT, and from ranges back to checked pages.

The work is the codec's and the checksum's, both of which leave the interpreter lock: callers that have threads encode
pages with `encode_page` there and join them with `assemble_chunk`; `build_chunk` does both in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from s3kv.format.codecs import Codec, decode_block, encode_block
from s3kv.format.header import ChunkHeader, Frame, encode_header, header_size
from s3kv.format.wire import Buffer, checksum, flat, need


@dataclass(frozen=True, slots=True)
class EncodedPage:
    """A page ready to be stored: `buffers` joined are its frame. They may be views of the page: it stays borrowed."""

    codec_id: int
    buffers: tuple[Buffer, ...]
    length: int
    raw_length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ChunkContent:
    """What a chunk object is about, apart from its pages; the fields are those of `ChunkHeader`."""

    namespace_digest: bytes
    layer_group: int
    parent: bytes
    start_block: int
    shards: tuple[int, ...]
    blocks: tuple[bytes, ...]
    element_size: int


def encode_page(raw: Buffer, codec: Codec, element_size: int) -> EncodedPage:
    """The frame of one page and the checksum of its uncompressed bytes."""
    view = flat(raw)
    codec_id, buffers = encode_block(view, codec, element_size)
    return EncodedPage(codec_id, tuple(buffers), sum(map(len, buffers)), len(view), checksum(view))


def assemble_chunk(content: ChunkContent, pages: Sequence[EncodedPage]) -> tuple[ChunkHeader, list[Buffer]]:
    """The header, and the parts whose join is the object (the encoded header first), of pages in frame order.

    Frame order is block by block and, within a block, shard by shard. No page is copied; the object's size is
    `header.object_bytes`. ValueError when the pages do not fit the content or exceed the limits of the format.
    """
    position = header_size(len(content.blocks), len(content.shards))
    frames = []
    for page in pages:
        frames.append(Frame(position, page.length, page.raw_length, page.codec_id, page.checksum))
        position += page.length
    header = ChunkHeader(
        namespace_digest=content.namespace_digest,
        layer_group=content.layer_group,
        parent=content.parent,
        start_block=content.start_block,
        shards=content.shards,
        codec_id=max((page.codec_id for page in pages), default=0),
        element_size=content.element_size,
        blocks=content.blocks,
        frames=tuple(frames),
    )
    parts: list[Buffer] = [encode_header(header)]
    for page in pages:
        parts.extend(page.buffers)
    return header, parts


def build_chunk(
    content: ChunkContent, pages: Sequence[Sequence[Buffer]], codec: Codec
) -> tuple[ChunkHeader, list[Buffer]]:
    """As `assemble_chunk`, from raw pages: `pages[block][shard]`, borrowed until the parts are written."""
    if any(len(row) != len(content.shards) for row in pages):
        raise ValueError("build_chunk needs one page per block and shard")
    encoded = [encode_page(page, codec, content.element_size) for row in pages for page in row]
    return assemble_chunk(content, encoded)


def read_frame(header: ChunkHeader, block_index: int, shard_index: int, data: Buffer, out: Buffer) -> None:
    """Decodes `data`, the bytes of one frame, into the writable `out`, and checks them.

    CorruptData unless `data` and `out` have the frame's lengths and the page its checksum; `out` is undefined then.
    """
    frame = header.frame(block_index, shard_index)
    source, page = flat(data), flat(out)
    need(len(source) == frame.length, "frame has a wrong length")
    need(len(page) == frame.raw_length, "page has a wrong length")
    decode_block(source, frame.codec, header.element_size, page)
    need(checksum(page) == frame.checksum, "page has a wrong checksum")


def check_page(header: ChunkHeader, block_index: int, shard_index: int, page: Buffer) -> None:
    """Checks a page in its place (a raw frame that was read straight into a slot). CorruptData when it is not right."""
    frame = header.frame(block_index, shard_index)
    need(len(flat(page)) == frame.raw_length, "page has a wrong length")
    need(checksum(page) == frame.checksum, "page has a wrong checksum")
