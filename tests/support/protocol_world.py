"""The world of the simulated protocol: a bucket, processes that freeze and die, and what must always hold.

Checked at each call: an add record only after all of its objects; a deletion record speaks of an add that there was; an
object is deleted only after a deletion record, and not when an add could be read before.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from s3kv.errors import StoreError, Transient
from s3kv.format.keys import chunk_key, chunks_prefix, parse_chunk_key, parse_log_key
from s3kv.format.records import ChunkAdded, ChunkDeleted
from s3kv.format.segment import decode_segment
from s3kv.store.base import Body, Capabilities, Page
from s3kv.store.buffers import body_parts
from support.catalog_model import Died, RecordingStore
from support.catalogs import added, chain, namespace
from support.dict_index import Disk
from support.virtual_loop import SeededLoop

SPEC = namespace(groups=2)
CHAINS = [chain("a", 4)]
CHUNKS = [
    added(SPEC, blocks[first:end], parent=blocks[first - 1] if first else bytes(16), start=first)
    for blocks in CHAINS
    for first, end in ((0, 2), (2, 4), (0, 4), (3, 4))
]
OBJECTS = {(chunk.chunk_id, group): b"%d of " % group + chunk.chunk_id for chunk in CHUNKS for group in range(2)}

FIRST = 0.6  # share of a call's time that passes before it has its effect; others then run in any case


class Violation(AssertionError):
    """The protocol let something happen that it promises not to."""


def must(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(slots=True)
class Process:
    """One process: it is frozen until a time, dies at its n-th write, and its run number tells its lives apart."""

    name: str
    skew_s: float
    dies_at_write: int | None = None
    dies_after: bool = False
    dead: bool = False
    frozen_until: float = 0.0
    writes: int = 0
    caught_up_s: float = 0.0  # when the last complete reading of the log began


@dataclass(slots=True)
class World:
    loop: SeededLoop
    rng: random.Random
    store: RecordingStore
    disk: Disk
    slow: float  # share of the steps of calls that take long
    failing: float  # share of calls that fail
    calm: bool = False
    objects_ever: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def clock(self, process: Process) -> Callable[[], float]:
        return lambda: self.loop.time() + process.skew_s


class ProcessStore:
    """The bucket as one process reaches it."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self.capabilities = Capabilities(conditional_put=True, conditional_match=True)

    async def _pass(self, share: float) -> None:
        """Time passes on the way, and the process may be frozen or found dead."""
        world, process = self._world, self._process
        if not world.calm:
            if delay := _latency(world.rng, world.slow):
                await asyncio.sleep(share * delay)
            elif share == FIRST:
                await asyncio.sleep(0)
            while process.frozen_until > world.loop.time():
                await asyncio.sleep(process.frozen_until - world.loop.time())
        if process.dead:
            raise Died

    async def _read(self, work: Callable[[], Awaitable[Any]]) -> Any:
        await self._pass(FIRST)
        if not self._world.calm and self._world.rng.random() < self._world.failing:
            self._world.counts["failed reads"] += 1
            raise Transient("no answer")
        result = await work()
        await self._pass(0.4)
        return result

    async def _write(self, work: Callable[[], Awaitable[Any]]) -> Any:
        world, process = self._world, self._process
        await self._pass(FIRST)
        process.writes += 1
        dying = process.writes == process.dies_at_write
        if dying and not process.dies_after:
            self._die()
        if not world.calm and (luck := world.rng.random()) < world.failing:
            world.counts["lost answers" if luck < world.failing / 2 else "failed writes"] += 1
            if luck < world.failing / 2:
                with suppress(StoreError):
                    await work()
            raise Transient("no answer")
        result = await work()
        if dying:
            self._die()
        await self._pass(0.4)
        return result

    def _die(self) -> None:
        self._process.dead = True
        self._world.counts["deaths"] += 1
        raise Died

    async def get(self, key: str, max_bytes: int) -> bytes:
        result: bytes = await self._read(lambda: self._world.store.get(key, max_bytes))
        return result

    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        result: tuple[bytes, str] = await self._read(lambda: self._world.store.get_with_etag(key, max_bytes))
        return result

    async def get_into(self, key: str, out: memoryview, offset: int = 0) -> int:
        result: int = await self._read(lambda: self._world.store.get_into(key, out, offset))
        return result

    async def head(self, key: str) -> Any:
        return await self._read(lambda: self._world.store.head(key))

    async def list(self, prefix: str, start_after: str | None = None) -> AsyncIterator[Page]:
        await self._read(lambda: asyncio.sleep(0))
        async for page in self._world.store.list(prefix, start_after):
            yield page
            await self._pass(0.2)

    async def put(self, key: str, body: Body) -> Any:
        return await self._write(lambda: self._put(key, body, self._world.store.put))

    async def put_if_absent(self, key: str, body: Body) -> Any:
        return await self._write(lambda: self._put(key, body, self._world.store.put_if_absent))

    async def put_if_match(self, key: str, body: Body, etag: str) -> Any:
        return await self._write(lambda: self._world.store.put_if_match(key, body, etag))

    async def _put(self, key: str, body: Body, put: Callable[[str, Body], Awaitable[str]]) -> str:
        world = self._world
        if parse_log_key(key) is not None:
            for record in decode_segment(b"".join(body_parts(body))).records:
                if isinstance(record, ChunkAdded):
                    objects = objects_of([record.chunk_id])
                    must(world.objects_ever.issuperset(objects), "an add was published before its objects")
                elif isinstance(record, ChunkDeleted):
                    known = {
                        (each.chunk_id, each.stamp) for each in world.store.history if isinstance(each, ChunkAdded)
                    }
                    must((record.chunk_id, record.stamp) in known, "a deletion of something that never was")
        etag = await put(key, body)
        if parse_chunk_key(key) is not None:
            world.objects_ever.add(key)
            world.counts["objects written"] += 1
        return etag

    async def delete(self, keys: Sequence[str]) -> Any:
        store = self._world.store
        readable = store.stored(before=self._process.caught_up_s)
        for key in keys:
            parsed = parse_chunk_key(key)
            if parsed is not None:
                records = [
                    (each, time)
                    for each, time in zip(store.history, store.times, strict=True)
                    if each.chunk_id == parsed.chunk_id
                ]
                deleted = any(isinstance(each, ChunkDeleted) for each, _ in records)
                # An orphan has no record to delete. One that its writer, stalled for longer than the orphan's age,
                # records just after the collector's last reading becomes a miss, and is forgotten by whoever meets it.
                readable_records = any(time < self._process.caught_up_s for _, time in records)
                must(deleted or not readable_records, "an object was deleted before a deletion was published")
                must(parsed.chunk_id not in readable, "an object was deleted although an add could be read")
                self._world.counts["objects deleted"] += 1
        return await self._write(lambda: store.delete(keys))


def _latency(rng: random.Random, slow: float) -> float:
    luck = rng.random()
    if luck < slow:
        return rng.choice((2.0, 10.0, 30.0, 100.0))
    return 0.0 if luck < 0.7 else rng.expovariate(10.0)


async def objects_held(world: World) -> set[str]:
    return {meta.key async for page in world.store.list(chunks_prefix(SPEC.name)) for meta in page}


def objects_of(stored: Iterable[bytes]) -> set[str]:
    return {chunk_key(SPEC.name, chunk_id, group) for chunk_id in stored for group in range(2)}
