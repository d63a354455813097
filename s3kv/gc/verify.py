"""Reading chunks back and checking every byte: identity, lengths, checksums.

What is missing or corrupt is a finding about the object; what the store could not give now (time-outs, refusals) is
not, and is reported apart, so that an outage is never taken for damage and repaired away.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from s3kv.catalog.entry import ChunkEntry
from s3kv.errors import CorruptData, NotFound, StoreError
from s3kv.format.chunk import read_frame
from s3kv.format.header import ChunkHeader, read_header
from s3kv.format.keys import chunk_key
from s3kv.format.records import DeleteReason
from s3kv.identity import NamespaceSpec
from s3kv.store import Store

WINDOW_BYTES = 16 << 20
"""Frames are read in ranges of about this size: bounds the memory of one chunk being checked."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` is MISSING or CORRUPT for a bad chunk, None for a good one or for one that could not be read now."""

    chunk_id: bytes
    bytes_read: int
    reason: DeleteReason | None = None
    unreadable: bool = False
    detail: str = ""

    @property
    def good(self) -> bool:
        return self.reason is None and not self.unreadable


@dataclass(slots=True)
class Summary:
    checked: int = 0
    bytes: int = 0
    bad: list[Verdict] = field(default_factory=list)
    unreadable: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.checked += 1
        self.bytes += verdict.bytes_read
        if verdict.reason is not None:
            self.bad.append(verdict)
        elif verdict.unreadable:
            self.unreadable.append(verdict)


def sampled(entries: Iterable[ChunkEntry], fraction: float, seed: int) -> Iterator[ChunkEntry]:
    """About `fraction` of the chunks, chosen by their ids: another seed, another sample."""
    limit, key = int(fraction * 2**32), str(seed).encode()
    for entry in entries:
        drawn = hashlib.blake2b(entry.chunk_id, digest_size=4, key=key[:64]).digest()
        if int.from_bytes(drawn, "big") < limit:
            yield entry


async def verify_chunks(
    store: Store, namespace: NamespaceSpec, entries: Iterable[ChunkEntry], *, concurrency: int
) -> AsyncIterator[Verdict]:
    """A verdict for each chunk, in order, with up to `concurrency` being read. Leaves nothing behind when stopped."""
    waiting: list[asyncio.Task[Verdict]] = []
    try:
        for entry in entries:
            waiting.append(asyncio.create_task(verify_chunk(store, namespace, entry)))
            if len(waiting) >= concurrency:
                yield await waiting.pop(0)
        while waiting:
            yield await waiting.pop(0)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def verify_chunk(store: Store, namespace: NamespaceSpec, entry: ChunkEntry) -> Verdict:
    read = 0
    try:
        for group in range(len(entry.added.groups)):
            read += await verify_object(store, namespace, entry, group)
    except NotFound:
        return Verdict(entry.chunk_id, read, DeleteReason.MISSING, detail=f"g{group} is gone")
    except CorruptData as error:
        return Verdict(entry.chunk_id, read, DeleteReason.CORRUPT, detail=f"g{group}: {error}")
    except StoreError as error:
        return Verdict(entry.chunk_id, read, unreadable=True, detail=f"g{group}: {error}")
    return Verdict(entry.chunk_id, read)


async def verify_object(store: Store, namespace: NamespaceSpec, entry: ChunkEntry, group: int) -> int:
    """Bytes read. Raises CorruptData for the first thing that is wrong, and what the store raises."""
    added = entry.added
    size, header_size = added.groups[group]
    key = chunk_key(namespace.name, added.chunk_id, group)
    meta = await store.head(key)
    if meta.size != size:
        raise CorruptData(f"the object has {meta.size} bytes, its record says {size}")
    buffer = bytearray(header_size)
    await store.get_into(key, memoryview(buffer))
    header = read_header(buffer, expect_namespace=namespace.digest, expect_chunk=added.chunk_id, expect_group=group)
    shards = namespace.shards_of_group[group]
    if header.object_bytes != size or header.start_block != added.start_block or header.shards != shards:
        raise CorruptData("header and record disagree")
    await check_frames(header, lambda offset, out: store.get_into(key, out, offset))
    return size


async def check_frames(header: ChunkHeader, read: Callable[[int, memoryview], Any]) -> None:
    """Reads every frame through `read(offset, out)` and checks it. Raises CorruptData that names the block."""
    first = 0
    while first < len(header.blocks):
        count = _window(header, first)
        offset, length = header.span(first, count)
        data = bytearray(length)
        await read(offset, memoryview(data))
        await asyncio.to_thread(_check_blocks, header, first, count, offset, memoryview(data))
        first += count


def _window(header: ChunkHeader, first: int) -> int:
    count = 1
    while first + count < len(header.blocks) and header.span(first, count + 1)[1] <= WINDOW_BYTES:
        count += 1
    return count


def _check_blocks(header: ChunkHeader, first: int, count: int, base: int, data: memoryview) -> None:
    scratch = bytearray()
    for block in range(first, first + count):
        for shard in range(len(header.shards)):
            frame = header.frame(block, shard)
            if len(scratch) < frame.raw_length:
                scratch = bytearray(frame.raw_length)
            begin = frame.offset - base
            page = memoryview(scratch)[: frame.raw_length]
            try:
                read_frame(header, block, shard, data[begin : begin + frame.length], page)
            except CorruptData as error:
                raise CorruptData(f"block {block}, shard {header.shards[shard]}: {error}") from error
