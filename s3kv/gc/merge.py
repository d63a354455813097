"""Merging small chunks of one chain into one: fewer objects to list, fetch and pay for. The plan is pure.

The new chunk is whole in the bucket and published before the old ones are superseded; collecting these is the
ordinary business of a plan. Frames are copied as they are stored: nothing is decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from s3kv.catalog.entry import ChunkEntry
from s3kv.errors import AlreadyExists, CorruptData
from s3kv.format.header import ChunkHeader, Frame, chunk_id, encode_header, header_size, read_header
from s3kv.format.keys import chunk_key
from s3kv.format.limits import MAX_BLOCKS, MAX_FRAMES
from s3kv.format.records import ChunkAdded, GroupObject, Stamp
from s3kv.identity import NamespaceSpec
from s3kv.store import BytesLike, Store

SMALL_SHARE = 0.5
"""A chunk below this share of the target is small."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Chunks that follow each other in one chain, in order."""

    parts: tuple[ChunkEntry, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


def plan_merges(entries: Iterable[ChunkEntry], target_bytes: int) -> list[Merge]:
    """Runs of two or more small chunks where each is all that continues the one before, up to `target_bytes` each.

    Where a chain branches nothing is merged across the branch: one branch would carry the other's prefix along. Memory
    is that of the small chunks.
    """
    small = [entry for entry in entries if entry.size < target_bytes * SMALL_SHARE]
    by_parent: dict[bytes, list[ChunkEntry]] = {}
    for entry in small:
        by_parent.setdefault(entry.added.parent, []).append(entry)
    followers = {entry.blocks[-1] for entry in small}
    merges = []
    for entry in small:
        if entry.added.parent not in followers or len(by_parent[entry.added.parent]) > 1:
            merges += _runs_from(entry, by_parent, target_bytes)
    return merges


def _runs_from(first: ChunkEntry, by_parent: dict[bytes, list[ChunkEntry]], target_bytes: int) -> list[Merge]:
    runs, run, seen = [], [first], {first.chunk_id}
    while True:
        following = by_parent.get(run[-1].blocks[-1], [])
        if len(following) != 1 or following[0].chunk_id in seen:
            break
        entry = following[0]
        seen.add(entry.chunk_id)
        if _fits([*run, entry], target_bytes):
            run.append(entry)
        else:
            runs.append(run)
            run = [entry]
    return [Merge(tuple(each)) for each in [*runs, run] if len(each) > 1]


def _fits(run: list[ChunkEntry], target_bytes: int) -> bool:
    first, last = run[0].added, run[-1].added
    blocks = sum(len(part.blocks) for part in run)
    ordinals = sum(len(part.blocks) for part in run[:-1]) + first.start_block
    return (
        sum(part.size for part in run) <= target_bytes
        and blocks <= MAX_BLOCKS
        and blocks * len(first.shards) <= MAX_FRAMES
        and first.shards == last.shards
        and ordinals == last.start_block
    )


async def carry_out(store: Store, namespace: NamespaceSpec, merge: Merge) -> ChunkAdded:
    """Writes the merged chunk's objects and returns its record (its stamp is set when it is published).

    Raises CorruptData or NotFound for a bad part (nothing is published then; objects may be left: orphans), StoreError.
    """
    objects = [await _merge_group(store, namespace, merge, group) for group in range(len(merge.parts[0].added.groups))]
    first = merge.parts[0].added
    blocks = tuple(block for part in merge.parts for block in part.blocks)
    return ChunkAdded(
        chunk_id=chunk_id(namespace.digest, first.parent, blocks),
        stamp=Stamp(0, 0),
        parent=first.parent,
        start_block=first.start_block,
        blocks=blocks,
        codec_id=max(header.codec_id for header in objects),
        shards=first.shards,
        groups=tuple(GroupObject(header.object_bytes, header.header_bytes) for header in objects),
    )


async def _merge_group(store: Store, namespace: NamespaceSpec, merge: Merge, group: int) -> ChunkHeader:
    read = await asyncio.gather(*(_read_part(store, namespace, part, group) for part in merge.parts))
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
    with suppress(AlreadyExists):  # the key determines its content: another collector merged the same
        await store.put_if_absent(chunk_key(namespace.name, merged.chunk_id, group), body)
    return merged


async def _read_part(
    store: Store, namespace: NamespaceSpec, part: ChunkEntry, group: int
) -> tuple[ChunkHeader, memoryview]:
    size = part.added.groups[group].size
    data = memoryview(bytearray(size))
    await store.get_into(chunk_key(namespace.name, part.chunk_id, group), data)
    header = read_header(data, expect_namespace=namespace.digest, expect_chunk=part.chunk_id, expect_group=group)
    if header.object_bytes != size or header.shards != part.added.shards:
        raise CorruptData("header and record disagree")
    return header, data
