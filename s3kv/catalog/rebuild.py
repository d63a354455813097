"""The catalog made again from the chunks' own headers: what is in the bucket but not in the catalog, and the reverse.

Objects come in the order of chunk ids, as the index does, so the two are walked side by side in bounded memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from s3kv.catalog.context import Context
from s3kv.catalog.entry import ChunkEntry, Tombstone, unpack
from s3kv.catalog.index import Index
from s3kv.errors import CorruptData, NotFound
from s3kv.format.header import HEADER_PROBE_BYTES, ChunkHeader, header_bytes_of, read_header
from s3kv.format.keys import chunk_key, chunks_prefix, parse_chunk_key
from s3kv.format.records import ChunkAdded, DeleteReason, GroupObject, Record, Stamp
from s3kv.store import ObjectMeta

READ_CHUNKS = 16  # at once
PUBLISH_CHUNKS = 512  # in one segment

Publish = Callable[[Sequence[Record]], Awaitable[None]]
Forget = Callable[[Sequence[bytes], DeleteReason], Awaitable[int]]


@dataclass(slots=True)
class Rebuilt:
    """Chunks by what was found. `incomplete`: a layer group is missing, damaged, or disagrees; left for collection.
    `unreadable`: segments and snapshots of the catalog that nobody will ever read, deleted."""

    known: int = 0
    found: int = 0
    forgotten: int = 0
    awaiting_deletion: int = 0
    incomplete: int = 0
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of one chunk id."""

    chunk_id: bytes
    groups: dict[int, ObjectMeta]


async def rebuild(
    context: Context, index: Index, publish: Publish, forget: Forget, lost: Sequence[str] = ()
) -> Rebuilt:
    """Publishes a record for every whole chunk that `index` does not know, and forgets those whose objects are gone.

    Then deletes the objects `lost` of the catalog: what they said of stored chunks has been said again.
    May be repeated and run beside agents that write. A chunk that was forgotten on purpose stays so. Raises StoreError;
    what was published until then stays.
    """
    rebuilt = Rebuilt()
    entries = _Walk(index)
    unknown: list[Objects] = []
    async for objects in _list_chunks(context):
        await _forget_gone(context, entries.below(objects.chunk_id), forget, rebuilt)
        entry = entries.at(objects.chunk_id)
        if isinstance(entry, Tombstone):
            rebuilt.awaiting_deletion += 1
        elif isinstance(entry, ChunkEntry) and len(objects.groups) == len(context.spec.groups):
            rebuilt.known += 1
        elif isinstance(entry, ChunkEntry):
            await _forget_gone(context, iter([entry]), forget, rebuilt)
        else:
            unknown.append(objects)
        if len(unknown) >= PUBLISH_CHUNKS:
            await _publish_whole(context, unknown, publish, rebuilt)
            unknown = []
    await _forget_gone(context, entries.below(None), forget, rebuilt)
    await _publish_whole(context, unknown, publish, rebuilt)
    if lost:
        rebuilt.unreadable = len(lost) - len(await context.store.delete(lost))
    return rebuilt


class _Walk:
    """The index's entries in order, a page at a time."""

    def __init__(self, index: Index) -> None:
        self._entries = self._all(index)
        self._next: ChunkEntry | Tombstone | None = None
        self._begun = False

    def _peek(self) -> ChunkEntry | Tombstone | None:
        if not self._begun:
            self._begun = True
            self._next = next(self._entries, None)
        return self._next

    @staticmethod
    def _all(index: Index) -> Iterator[ChunkEntry | Tombstone]:
        after = b""
        while page := index.packed(after, 256):
            after = page[-1][0]
            yield from (unpack(value) for _, value in page)

    def below(self, chunk_id: bytes | None) -> Iterator[ChunkEntry]:
        """The stored chunks that come next, before `chunk_id` (None: all)."""
        while (entry := self._peek()) is not None and (chunk_id is None or entry.chunk_id < chunk_id):
            self._next = next(self._entries, None)
            if isinstance(entry, ChunkEntry):
                yield entry

    def at(self, chunk_id: bytes) -> ChunkEntry | Tombstone | None:
        entry = self._peek()
        if entry is None or entry.chunk_id != chunk_id:
            return None
        self._next = next(self._entries, None)
        return entry


async def _list_chunks(context: Context) -> AsyncIterator[Objects]:
    current: Objects | None = None
    async for page in context.store.list(chunks_prefix(context.spec.name)):
        for meta in page:
            key = parse_chunk_key(meta.key)
            if key is None:
                continue
            if current is None or current.chunk_id != key.chunk_id:
                if current is not None:
                    yield current
                current = Objects(key.chunk_id, {})
            current.groups[key.group] = meta
    if current is not None:
        yield current


async def _forget_gone(context: Context, entries: Iterator[ChunkEntry], forget: Forget, rebuilt: Rebuilt) -> None:
    """A page of the listing may be older than the record, so each object is asked for before its chunk is forgotten."""
    for entry in entries:
        try:
            for group in range(len(entry.added.groups)):
                await context.store.head(chunk_key(context.spec.name, entry.chunk_id, group))
        except NotFound:
            rebuilt.forgotten += await forget([entry.chunk_id], DeleteReason.MISSING)
        else:
            rebuilt.known += 1


async def _publish_whole(context: Context, unknown: Sequence[Objects], publish: Publish, rebuilt: Rebuilt) -> None:
    records: list[Record] = []
    for start in range(0, len(unknown), READ_CHUNKS):
        read = await asyncio.gather(*(read_chunk(context, each) for each in unknown[start : start + READ_CHUNKS]))
        records.extend(record for record in read if record is not None)
    rebuilt.found += len(records)
    rebuilt.incomplete += len(unknown) - len(records)
    if records:
        await publish(records)


async def read_chunk(context: Context, objects: Objects) -> ChunkAdded | None:
    """The record of a chunk by the headers of all its objects; None when they are not whole and of one mind."""
    if set(objects.groups) != set(range(len(context.spec.groups))):
        return None
    try:
        headers = [await _read_header(context, objects, group) for group in sorted(objects.groups)]
    except (CorruptData, NotFound):
        return None
    first = headers[0]
    if any((each.start_block, each.blocks) != (first.start_block, first.blocks) for each in headers):
        return None
    return ChunkAdded(
        chunk_id=objects.chunk_id,
        stamp=Stamp(0, 0),  # set when it is published
        parent=first.parent,
        start_block=first.start_block,
        blocks=first.blocks,
        codec_id=max(each.codec_id for each in headers),
        shards=tuple(sorted({shard for each in headers for shard in each.shards})),
        groups=tuple(GroupObject(each.object_bytes, each.header_bytes) for each in headers),
    )


async def _read_header(context: Context, objects: Objects, group: int) -> ChunkHeader:
    meta = objects.groups[group]
    buffer = memoryview(bytearray(min(meta.size, HEADER_PROBE_BYTES)))
    await context.store.get_into(meta.key, buffer)
    needed = header_bytes_of(buffer)
    if needed > len(buffer):
        buffer = memoryview(bytearray(min(meta.size, needed)))
        await context.store.get_into(meta.key, buffer)
    header = read_header(
        buffer, expect_namespace=context.spec.digest, expect_chunk=objects.chunk_id, expect_group=group
    )
    if header.object_bytes != meta.size:
        raise CorruptData(f"object {meta.key} has {meta.size} bytes, its header says {header.object_bytes}")
    return header
