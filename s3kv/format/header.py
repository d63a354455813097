"""The header of a chunk object: what it holds, for whom, and where each frame is. Layout: `docs/format.md`.

A frame is the stored form of one page: one block, in the object's layer group, on one shard. Frames follow the header
without gaps, block by block and within a block shard by shard, so any run of blocks is one range of the object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from s3kv.errors import CorruptData
from s3kv.format.limits import (
    DIGEST_BYTES,
    FORMAT,
    ID_BYTES,
    MAX_BLOCKS,
    MAX_ELEMENT_SIZE,
    MAX_FRAMES,
    MAX_GROUPS,
    MAX_OBJECT_BYTES,
    MAX_PAGE_BYTES,
    MAX_SHARDS,
    U32,
    U64,
)
from s3kv.format.records import check_shards
from s3kv.format.wire import CHECKSUM_BYTES, Buffer, Cursor, flat, need, seal, unseal

MAGIC = b"S3KVCHK\n"

# magic, format, header bytes, namespace digest, chunk id, parent, start block, blocks, group, shards, codec, element
_FIXED = Struct("<8sII32s16s16sIIBBBB4x")
_FRAME = Struct("<QIIQB7x")  # offset, length, raw length, checksum, codec

FIXED_HEADER_BYTES = _FIXED.size
HEADER_ALIGNMENT = 64
HEADER_PROBE_BYTES = 16 << 10  # a first range request of this size gets the header of nearly every chunk

CODEC_RAW, CODEC_ZSTD_PLANES = 0, 1
CODECS = (CODEC_RAW, CODEC_ZSTD_PLANES)

_CHUNK_ID_PERSON = b"s3kv chunk 1"


class Frame(NamedTuple):
    """One page as stored: `length` bytes at `offset` of the object, which decode by `codec` into `raw_length` bytes.

    `checksum` is the xxh3_64 of those `raw_length` bytes.
    """

    offset: int
    length: int
    raw_length: int
    codec: int
    checksum: int


def chunk_id(namespace_digest: bytes, parent: bytes, hashes: Sequence[bytes]) -> bytes:
    """The 16 bytes that name a chunk: blake2b-128, keyed by its namespace, over parent hash and block hashes."""
    message = b"".join([parent, *hashes])
    return hashlib.blake2b(message, digest_size=ID_BYTES, key=namespace_digest, person=_CHUNK_ID_PERSON).digest()


def header_size(n_blocks: int, n_shards: int) -> int:
    """Bytes from the object's start to its first frame."""
    used = FIXED_HEADER_BYTES + n_shards + n_blocks * ID_BYTES + n_blocks * n_shards * _FRAME.size + CHECKSUM_BYTES
    return -(-used // HEADER_ALIGNMENT) * HEADER_ALIGNMENT


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What a chunk object says of itself.

    `parent` is the hash of the block before `blocks[0]` (ROOT for the first of a chain) and `start_block` the ordinal
    of `blocks[0]` in its chain. `shards` are the ids of the parts stored here, ascending. `frames` has one entry per
    block per shard, block by block. `codec_id` is the largest codec of any frame; `element_size` the bytes of one KV
    element, by which planes are cut. Values outside the limits raise ValueError.
    """

    namespace_digest: bytes
    layer_group: int
    parent: bytes
    start_block: int
    shards: tuple[int, ...]
    codec_id: int
    element_size: int
    blocks: tuple[bytes, ...]
    frames: tuple[Frame, ...]

    def __post_init__(self) -> None:
        _check_header(self)

    @property
    def chunk_id(self) -> bytes:
        return chunk_id(self.namespace_digest, self.parent, self.blocks)

    @property
    def header_bytes(self) -> int:
        return header_size(len(self.blocks), len(self.shards))

    @property
    def object_bytes(self) -> int:
        """Bytes of the whole object."""
        last = self.frames[-1]
        return last.offset + last.length

    def frame(self, block_index: int, shard_index: int) -> Frame:
        """The frame of `blocks[block_index]` on `shards[shard_index]`."""
        if not (0 <= block_index < len(self.blocks) and 0 <= shard_index < len(self.shards)):
            raise IndexError(f"chunk has no block {block_index} of shard index {shard_index}")
        return self.frames[block_index * len(self.shards) + shard_index]

    def span(self, first_block: int, n_blocks: int) -> tuple[int, int]:
        """(offset, length) of the range of the object that holds all frames of `n_blocks` >= 1 blocks."""
        begin = self.frame(first_block, 0).offset
        last = self.frame(first_block + n_blocks - 1, len(self.shards) - 1)
        return begin, last.offset + last.length - begin


def encode_header(header: ChunkHeader) -> bytes:
    """The object's first `header.header_bytes` bytes: table, zero padding, checksum."""
    size = header.header_bytes
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT,
        size,
        header.namespace_digest,
        header.chunk_id,
        header.parent,
        header.start_block,
        len(header.blocks),
        header.layer_group,
        len(header.shards),
        header.codec_id,
        header.element_size,
    )
    table = bytearray(_FRAME.size * len(header.frames))
    for index, (offset, length, raw_length, codec, checksum) in enumerate(header.frames):
        _FRAME.pack_into(table, index * _FRAME.size, offset, length, raw_length, checksum, codec)
    body = b"".join([fixed, bytes(header.shards), *header.blocks, table])
    return seal(body.ljust(size - CHECKSUM_BYTES, b"\0"))


def header_bytes_of(prefix: Buffer) -> int:
    """Bytes of the whole header, from its first FIXED_HEADER_BYTES. CorruptData when these cannot begin one."""
    return _read_fixed(prefix).header_bytes


def read_header(
    data: Buffer,
    *,
    expect_namespace: bytes | None = None,
    expect_chunk: bytes | None = None,
    expect_group: int | None = None,
) -> ChunkHeader:
    """The header at the start of `data`, which may hold frames after it.

    CorruptData when `data` is too short or damaged, when the chunk id is not that of the blocks listed, or when the
    header is not for what the caller expects: an object forged or misplaced under a key is refused here.
    """
    view = flat(data)
    fixed = _read_fixed(view)
    need(len(view) >= fixed.header_bytes, "chunk header ends early")
    body = unseal(view[: fixed.header_bytes], "chunk header")
    need(expect_namespace is None or fixed.namespace_digest == expect_namespace, "chunk belongs to another namespace")
    need(expect_chunk is None or fixed.chunk_id == expect_chunk, "object holds another chunk")
    need(expect_group is None or fixed.layer_group == expect_group, "object holds another layer group")
    header = _read_body(fixed, body)
    need(header.chunk_id == fixed.chunk_id, "chunk id is not that of the blocks")
    return header


class _Fixed(NamedTuple):
    """The fields of `_FIXED`."""

    magic: bytes
    version: int
    header_bytes: int
    namespace_digest: bytes
    chunk_id: bytes
    parent: bytes
    start_block: int
    n_blocks: int
    layer_group: int
    n_shards: int
    codec_id: int
    element_size: int


def _read_fixed(data: Buffer) -> _Fixed:
    fixed = _Fixed._make(Cursor(flat(data), "chunk header").unpack(_FIXED))
    n_blocks, n_shards = fixed.n_blocks, fixed.n_shards
    need(fixed.magic == MAGIC, "not a chunk object")
    need(fixed.version == FORMAT, f"chunk has format {fixed.version}, not {FORMAT}")
    need(1 <= n_blocks <= MAX_BLOCKS and 1 <= n_shards <= MAX_SHARDS, "chunk has too few or many blocks or shards")
    need(n_blocks * n_shards <= MAX_FRAMES, "chunk has too many frames")
    need(fixed.header_bytes == header_size(n_blocks, n_shards), "chunk header has a wrong length")
    return fixed


def _read_body(fixed: _Fixed, body: memoryview) -> ChunkHeader:
    cursor = Cursor(body, "chunk header")
    cursor.take(FIXED_HEADER_BYTES)
    shards = tuple(cursor.take(fixed.n_shards))
    hashes = bytes(cursor.take(fixed.n_blocks * ID_BYTES))
    rows = _FRAME.iter_unpack(cursor.take(fixed.n_blocks * fixed.n_shards * _FRAME.size))
    need(not any(cursor.take(cursor.left)), "chunk header has bytes after its table")
    try:
        return ChunkHeader(
            namespace_digest=fixed.namespace_digest,
            layer_group=fixed.layer_group,
            parent=fixed.parent,
            start_block=fixed.start_block,
            shards=shards,
            codec_id=fixed.codec_id,
            element_size=fixed.element_size,
            blocks=tuple(hashes[at : at + ID_BYTES] for at in range(0, len(hashes), ID_BYTES)),
            frames=tuple(Frame(offset, length, raw, codec, checksum) for offset, length, raw, checksum, codec in rows),
        )
    except ValueError as error:
        raise CorruptData(str(error)) from error


def _check_header(header: ChunkHeader) -> None:
    _check(len(header.namespace_digest) == DIGEST_BYTES, "namespace digest")
    _check(len(header.parent) == ID_BYTES and all(len(block) == ID_BYTES for block in header.blocks), "block hash")
    _check(0 <= header.layer_group < MAX_GROUPS, "layer group")
    _check(0 <= header.start_block <= U32, "start block")
    _check(1 <= header.element_size <= MAX_ELEMENT_SIZE, "element size")
    check_shards(header.shards)
    _check(1 <= len(header.blocks) <= MAX_BLOCKS, "number of blocks")
    _check(len(header.frames) == len(header.blocks) * len(header.shards) <= MAX_FRAMES, "number of frames")
    _check_frames(header)


def _check_frames(header: ChunkHeader) -> None:
    """Frames have no gaps, so none can lie over another or outside the object."""
    position = header.header_bytes
    largest = CODEC_RAW
    for offset, length, raw_length, codec, checksum in header.frames:
        _check(offset == position, "frame offset")
        _check(0 <= length <= raw_length <= MAX_PAGE_BYTES, "frame length")
        _check(codec in CODECS and (codec != CODEC_RAW or length == raw_length), "frame codec")
        _check(0 <= checksum <= U64, "frame checksum")
        position += length
        largest = max(largest, codec)
    _check(position <= MAX_OBJECT_BYTES, "object size")
    _check(header.codec_id == largest, "chunk codec")


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"chunk header: {what} is outside the limits of the format")
