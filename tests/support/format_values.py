"""Values of every kind that the format stores: fixed ones, whose bytes are the golden files, and strategies."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from s3kv.format.chunk import ChunkContent, build_chunk
from s3kv.format.codecs import Codec
from s3kv.format.columns import Entry
from s3kv.format.header import ChunkHeader, chunk_id
from s3kv.format.records import ChunkAdded, ChunkDeleted, DeleteReason, GroupObject, Record, Stamp, Touched
from s3kv.format.snapshot import SegmentName, SnapshotHeader, encode_snapshot
from s3kv.identity.namespace import GroupSpec, NamespaceSpec, RegionSpec

NAMESPACE = bytes(range(32))
ROOT = bytes(16)
SHARDS = (0, 1, 255)

NAMESPACE_SPEC = NamespaceSpec(
    model="Modell-ä",
    weights="sha256:00ff",
    kv_dtype="bfloat16",
    tokens_per_block=32,
    groups=(
        GroupSpec((0, 2), None, (RegionSpec(4096, False, ((0, "key", 1), (0, "value", 1))),)),
        GroupSpec((1,), 1024, (RegionSpec(2048, False, ((1, "key", 1),)), RegionSpec(512, True, ((1, "scale", 1),)))),
    ),
    shards=2,
    extra=(("layout", "HND"),),
)


def block_hash(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)).to_bytes(16, "little")


def noise(count: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(count)


def bf16_page(elements: int, seed: int) -> bytes:
    """Little-endian two-byte floats: noise in the low bytes, few values in the high ones."""
    rng = random.Random(seed)
    return b"".join(bytes([rng.randrange(256), rng.choice((0x3F, 0xBF, 0x3E, 0xBE))]) for _ in range(elements))


def chunk_content(n_blocks: int = 3, *, element_size: int = 2, shards: tuple[int, ...] = SHARDS) -> ChunkContent:
    blocks = tuple(block_hash(number) for number in range(5, 5 + n_blocks))
    return ChunkContent(NAMESPACE, 1, block_hash(4), 4, shards, blocks, element_size)


def chunk_pages(content: ChunkContent, elements: int) -> list[list[bytes]]:
    n_shards = len(content.shards)
    return [[bf16_page(elements, row * n_shards + at) for at in range(n_shards)] for row in range(len(content.blocks))]


def built(codec: Codec, elements: int = 64, n_blocks: int = 3) -> tuple[ChunkHeader, bytes, list[list[bytes]]]:
    """(header, whole object, its pages)."""
    content = chunk_content(n_blocks)
    pages = chunk_pages(content, elements)
    header, parts = build_chunk(content, pages, codec)
    return header, b"".join(parts), pages


def added(number: int, n_blocks: int = 2, time_us: int = 1_700_000_000_000_000) -> ChunkAdded:
    blocks = tuple(block_hash(number + at) for at in range(1, n_blocks + 1))
    parent = block_hash(number)
    name = chunk_id(NAMESPACE, parent, blocks)
    groups = (GroupObject(70_000 + number, 640), GroupObject(5_000, 640))
    return ChunkAdded(name, Stamp(time_us + number, 0xA0B0C0D0), parent, number, blocks, 1, SHARDS, groups)


RECORDS: tuple[Record, ...] = (
    added(10),
    ChunkDeleted(added(10).chunk_id, Stamp(1_700_000_000_500_000, 7), DeleteReason.COLLECTED),
    ChunkDeleted(added(20).chunk_id, Stamp(1_700_000_000_500_001, 7), DeleteReason.CORRUPT),
    Touched(added(30).chunk_id, 472_222),
    added(30, n_blocks=5),
)
SNAPSHOT_HEADER = SnapshotHeader(
    NAMESPACE, 1_700_000_001_000_000, 3, 1_700_000_000_900_000, (SegmentName(1_700_000_000_950_000, 7, 1),)
)
ENTRIES: tuple[Entry, ...] = tuple(
    sorted(
        (
            Entry(added(10), 472_222),
            Entry(ChunkDeleted(added(20).chunk_id, Stamp(1_700_000_000_500_001, 7), DeleteReason.MISSING)),
            Entry(added(30, n_blocks=5), 472_223),
        ),
        key=lambda entry: entry.record.chunk_id,
    )
)


def snapshot_bytes() -> bytes:
    return b"".join(encode_snapshot(SNAPSHOT_HEADER, ENTRIES))


ids = st.binary(min_size=16, max_size=16)
digests = st.binary(min_size=32, max_size=32)
u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
stamps = st.builds(Stamp, u64, u32)
shard_sets = st.sets(st.integers(0, 255), min_size=1, max_size=5).map(lambda found: tuple(sorted(found)))
group_objects = st.tuples(st.integers(1, 4096), st.integers(0, 1 << 32)).map(
    lambda pair: GroupObject(pair[0] + pair[1], pair[0])
)


def tuples_of(element: st.SearchStrategy[object], maximum: int) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(element, min_size=1, max_size=maximum).map(tuple)


chunks_added = st.builds(
    ChunkAdded,
    chunk_id=ids,
    stamp=stamps,
    parent=ids,
    start_block=u32,
    blocks=tuples_of(ids, 6),
    codec_id=st.integers(0, 255),
    shards=shard_sets,
    groups=tuples_of(group_objects, 4),
)
chunks_deleted = st.builds(ChunkDeleted, chunk_id=ids, stamp=stamps, reason=st.sampled_from(DeleteReason))
touches = st.builds(Touched, chunk_id=ids, hour=u32)
records = st.one_of(chunks_added, chunks_deleted, touches)
entries = st.lists(
    st.builds(Entry, st.one_of(chunks_added, chunks_deleted), u32),
    max_size=8,
    unique_by=lambda entry: entry.record.chunk_id,
).map(lambda found: sorted(found, key=lambda entry: entry.record.chunk_id))
