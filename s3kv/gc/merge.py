"""Merging small chunks of one chain into one: fewer objects to list, fetch and pay for. The plan is pure.

The new chunk is whole in the bucket and published before the old ones are superseded; collecting these is the
ordinary business of a plan. Frames are copied as they are stored: nothing is decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from s3kv.catalog.entry import US, ChunkEntry
from s3kv.catalog.stored import header_beside
from s3kv.errors import AlreadyExists, CorruptData, NotFound
from s3kv.format.header import ChunkHeader, Frame, chunk_id, encode_header, header_size, read_header
from s3kv.format.keys import chunk_key
from s3kv.format.limits import MAX_BLOCKS, MAX_FRAMES
from s3kv.format.records import SECONDS_PER_HOUR, ChunkAdded, GroupObject, Stamp
from s3kv.gc.verify import check_frames
from s3kv.identity import NamespaceSpec
from s3kv.store import BytesLike, Store

SMALL_SHARE = 0.5
"""A chunk below this share of the target is small."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Ids of chunks that follow each other in one chain, in order; `size` bytes in all."""

    parts: tuple[bytes, ...]
    size: int


class _Small(NamedTuple):
    """What is kept of a small chunk while planning; `parent` and `tip` are 64 bits of a block hash."""

    chunk_id: bytes
    parent: int
    tip: int
    start: int
    blocks: int
    size: int
    shards: tuple[int, ...]


def plan_merges(entries: Iterable[ChunkEntry], target_bytes: int) -> list[Merge]:
    """Runs of two or more small chunks where each is all that continues the one before, up to `target_bytes` each.

    Where a chain branches nothing is merged across the branch: one branch would carry the other's prefix along. Keeps
    some 400 bytes for each small chunk, however many blocks it has.
    """
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    by_parent: dict[int, list[_Small]] = {}
    for entry in entries:
        if entry.size < target_bytes * SMALL_SHARE:
            small = _small(entry, known)
            by_parent.setdefault(small.parent, []).append(small)
    followed = {small.tip for group in by_parent.values() for small in group}
    merges = []
    for parent, group in by_parent.items():
        if parent not in followed or len(group) > 1:
            for small in group:
                merges += _runs_from(small, by_parent, target_bytes)
    return merges


def _small(entry: ChunkEntry, known: dict[tuple[int, ...], tuple[int, ...]]) -> _Small:
    added = entry.added
    shards = known.setdefault(added.shards, added.shards)  # one object for all that are equal
    parent, tip = int.from_bytes(added.parent[:8], "big"), int.from_bytes(added.blocks[-1][:8], "big")
    return _Small(added.chunk_id, parent, tip, added.start_block, len(added.blocks), added.size, shards)


def _runs_from(first: _Small, by_parent: dict[int, list[_Small]], target_bytes: int) -> list[Merge]:
    runs, run, seen = [], [first], {first.chunk_id}
    while True:
        following = by_parent.get(run[-1].tip, [])
        if len(following) != 1 or following[0].chunk_id in seen:
            break
        seen.add(following[0].chunk_id)
        if _fits(run, following[0], target_bytes):
            run.append(following[0])
        else:
            runs.append(run)
            run = [following[0]]
    return [
        Merge(tuple(part.chunk_id for part in each), sum(part.size for part in each))
        for each in [*runs, run]
        if len(each) > 1
    ]


def _fits(run: list[_Small], more: _Small, target_bytes: int) -> bool:
    blocks = sum(part.blocks for part in run)
    return (
        sum(part.size for part in run) + more.size <= target_bytes
        and blocks + more.blocks <= MAX_BLOCKS
        and (blocks + more.blocks) * len(more.shards) <= MAX_FRAMES
        and run[0].shards == more.shards
        and run[0].start + blocks == more.start
    )


async def carry_out(store: Store, namespace: NamespaceSpec, parts: Sequence[ChunkEntry]) -> ChunkAdded:
    """Writes the objects of the chunk that `parts` make and returns its record, as old as the last use of a part.

    Raises CorruptData or NotFound for a bad part (nothing is published then; objects may be left: orphans), StoreError.
    """
    first = parts[0].added
    if any(before.blocks[-1] != after.added.parent for before, after in pairwise(parts)):
        raise CorruptData("the chunks to be merged do not follow each other")
    objects = [await _merge_group(store, namespace, parts, group) for group in range(len(first.groups))]
    blocks = tuple(block for part in parts for block in part.blocks)
    return ChunkAdded(
        chunk_id=chunk_id(namespace.digest, first.parent, blocks),
        stamp=Stamp(max(part.touched_hour for part in parts) * SECONDS_PER_HOUR * US, 0),
        parent=first.parent,
        start_block=first.start_block,
        blocks=blocks,
        codec_id=max(header.codec_id for header in objects),
        shards=first.shards,
        groups=tuple(GroupObject(header.object_bytes, header.header_bytes) for header in objects),
    )


async def _merge_group(store: Store, namespace: NamespaceSpec, parts: Sequence[ChunkEntry], group: int) -> ChunkHeader:
    read = await asyncio.gather(*(_read_part(store, namespace, part, group) for part in parts))
    headers = [header for header, _ in read]
    first = headers[0]
    blocks = tuple(block for header in headers for block in header.blocks)
    position = header_size(len(blocks), len(first.shards))
    frames = []
    for header in headers:
        for frame in header.frames:
            frames.append(Frame(position, frame.length, frame.raw_length, frame.codec, frame.checksum))
            position += frame.length
    merged = ChunkHeader(
        namespace_digest=namespace.digest,
        layer_group=group,
        parent=first.parent,
        start_block=first.start_block,
        shards=first.shards,
        codec_id=max(header.codec_id for header in headers),
        element_size=first.element_size,
        blocks=blocks,
        frames=tuple(frames),
    )
    body: list[BytesLike] = [encode_header(merged), *(data[header.header_bytes :] for header, data in read)]
    key = chunk_key(namespace.name, merged.chunk_id, group)
    try:
        await store.put_if_absent(key, body)
    except AlreadyExists:
        if (found := await _whole(store, key, merged)) is not None:
            return found
        await store.put(key, body)  # what lies there is damaged: right bytes replace it
    return merged


async def _whole(store: Store, key: str, ours: ChunkHeader) -> ChunkHeader | None:
    """The header of the object of the same blocks that lies there; None when a byte of it is wrong.

    An engine or another collector stored it. Its encoding may differ from ours; the parts go once it is adopted, so
    every byte is looked at.
    """
    if (header := await header_beside(store, key, ours)) is None:
        return None
    try:
        await check_frames(header, lambda offset, out: store.get_into(key, out, offset))
    except (CorruptData, NotFound):
        return None
    return header


async def _read_part(
    store: Store, namespace: NamespaceSpec, part: ChunkEntry, group: int
) -> tuple[ChunkHeader, memoryview]:
    size = part.added.groups[group].size
    data = memoryview(bytearray(size))
    await store.get_into(chunk_key(namespace.name, part.chunk_id, group), data)
    header = read_header(data, expect_namespace=namespace.digest, expect_chunk=part.chunk_id, expect_group=group)
    if header.object_bytes != size or header.shards != namespace.shards_of_group[group]:
        raise CorruptData("header and record disagree")
    return header, data
