"""A deterministic simulation of the protocol between packers, readers, the catalog and the collector.

Three writers, two readers and one collector share a bucket in virtual time. They run the real catalog, the real lease
and the real collection; their clocks are skewed, their calls take from no time to longer than the grace period, some
fail, some answers are lost, processes freeze, and some die at one of their writes, before or right after it, and start
again with or without their index. Everything follows from the seed. What is checked on the way stands in
`protocol_world`; at the end, when faults have stopped, all agents agree with the join of all that was ever published,
what they say is stored is in the bucket and nothing else is, and a new agent that reads snapshot and log agrees too.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from unittest import mock

from s3kv.catalog.catalog import Catalog
from s3kv.errors import AlreadyExists, NotFound, S3kvError
from s3kv.format.keys import chunk_key
from s3kv.format.records import ChunkAdded, DeleteReason
from s3kv.gc.execute import Pace, Place, execute
from s3kv.gc.lease import acquire
from s3kv.gc.plan import Policy, Source, make_plan
from s3kv.gc.scan import scan_chunks
from s3kv.store import memory
from support.catalog_model import Died, RecordingStore
from support.catalogs import T0, settings
from support.dict_index import Disk, use_dict_indexes
from support.protocol_world import (
    CHAINS,
    CHUNKS,
    OBJECTS,
    SPEC,
    Process,
    ProcessStore,
    Violation,
    World,
    must,
    objects_held,
    objects_of,
)
from support.virtual_loop import SeededLoop, run_seeded

__all__ = ["Violation", "simulate"]

INDEXES = Path("/indexes")  # on the simulated disk
GRACE_S = 60.0
GIVE_UP_S = 40.0


class Actor:
    """A process with a catalog, started again whenever it dies."""

    def __init__(self, world: World, agent: int, name: str) -> None:
        self.world = world
        self.agent = agent
        self.process = Process(name, world.rng.uniform(-120, 120))
        self.catalog: Catalog = self._new_catalog()

    def _new_catalog(self) -> Catalog:
        world = self.world
        self.store = ProcessStore(world, self.process)
        return Catalog(
            self.store,  # type: ignore[arg-type]
            SPEC,
            INDEXES / self.process.name,
            agent_id=self.agent,
            clock=world.clock(self.process),
            settings=settings(compact_after_segments=3, poll_overlap_s=5.0),
            grace_s=GRACE_S,
            rng=world.rng,
        )

    async def live(self) -> None:
        """Runs until its work is done, through deaths."""
        for _ in range(3):
            try:
                await self._open()
                await self.work()
                return
            except Died:
                await self._reborn()

    async def _open(self) -> None:
        while True:
            with suppress(S3kvError):
                await self.catalog.open()
                return
            await asyncio.sleep(1)

    async def _reborn(self) -> None:
        rng = self.world.rng
        await asyncio.sleep(rng.choice((0.1, 10.0, 100.0)))
        old = self.process
        self.process = Process(old.name, rng.uniform(-120, 120))
        if rng.random() < 0.3:
            self.world.disk.indexes.pop(INDEXES / old.name / SPEC.name, None)
        self.catalog = self._new_catalog()

    async def work(self) -> None:
        raise NotImplementedError

    async def upkeep(self) -> None:
        with suppress(S3kvError):
            await self.catalog.poll()
        if self.catalog.wants_compaction() or self.world.rng.random() < 0.1:
            self.world.counts["compactions"] += 1
            with suppress(S3kvError):
                await self.catalog.compact(force=self.world.rng.random() < 0.5)


class Writer(Actor):
    async def work(self) -> None:
        rng = self.world.rng
        for _ in range(rng.randint(3, 6)):
            await asyncio.sleep(rng.expovariate(1 / 30))
            await self.upkeep()
            chunk = rng.choice(CHUNKS)
            places = self.catalog.lookup(chunk.blocks)
            if len(places) == len(chunk.blocks) and rng.random() < 0.8:
                self.catalog.touch([chunk.chunk_id])
                continue  # what another agent stored is not uploaded again
            with suppress(S3kvError, TimeoutError):
                async with asyncio.timeout(GIVE_UP_S):
                    await self._store(chunk)
                    self.world.counts["chunks stored"] += 1

    async def _store(self, chunk: ChunkAdded) -> None:
        """As the agent's uploader: every layer group at once, then the record."""
        async with asyncio.TaskGroup() as group_of_tasks:
            tasks = [group_of_tasks.create_task(self._guarded(chunk, group)) for group in range(2)]
        for task in tasks:
            if (error := task.result()) is not None:
                raise error
        await self.catalog.publish([chunk])
        must(self.catalog.chunk(chunk.chunk_id) is not None, "an add is not known to its own writer")

    async def _guarded(self, chunk: ChunkAdded, group: int) -> BaseException | None:
        try:
            await self._store_group(chunk, group)
        except (Died, S3kvError) as error:
            return error
        return None

    async def _store_group(self, chunk: ChunkAdded, group: int) -> None:
        key, body = chunk_key(SPEC.name, chunk.chunk_id, group), OBJECTS[chunk.chunk_id, group]
        try:
            await self.store.put_if_absent(key, body)
        except AlreadyExists:
            with suppress(NotFound):
                if not self.catalog.is_forgotten(chunk.chunk_id) and await self.store.get(key, 1 << 10) == body:
                    return
            await self.store.put(key, body)


class Reader(Actor):
    async def work(self) -> None:
        rng = self.world.rng
        for _ in range(rng.randint(2, 4)):
            await asyncio.sleep(rng.expovariate(1 / 50))
            await self.upkeep()
            await self.read(rng.choice(CHAINS))

    async def read(self, blocks: Sequence[bytes]) -> None:
        for chunk_id in dict.fromkeys(place.chunk_id for place in self.catalog.lookup(blocks)):
            await self.read_chunk(chunk_id)

    async def read_chunk(self, chunk_id: bytes) -> None:
        try:
            for group in range(2):
                body = await self.store.get(chunk_key(SPEC.name, chunk_id, group), 1 << 10)
                must(body == OBJECTS[chunk_id, group], "wrong bytes")
            self.world.counts["chunks read"] += 1
        except NotFound:
            self.world.counts["chunks missing"] += 1
            with suppress(S3kvError):
                await self.catalog.forget([chunk_id], DeleteReason.MISSING)
        except S3kvError:
            pass


class Collector(Actor):
    """Also the catalog that its own execution sees; it notes when each complete reading began."""

    def chunk(self, chunk_id: bytes) -> object:
        return self.catalog.chunk(chunk_id)

    @property
    def unread(self) -> int:
        return self.catalog.unread

    async def forget(self, chunk_ids: Sequence[bytes], reason: DeleteReason) -> int:
        return await self.catalog.forget(chunk_ids, reason)

    async def catch_up(self) -> None:
        began = self.world.loop.time()
        await self.catalog.catch_up()
        self.process.caught_up_s = began

    async def work(self) -> None:
        rng = self.world.rng
        for _ in range(rng.randint(1, 3)):
            await asyncio.sleep(rng.expovariate(1 / 20))
            with suppress(S3kvError):
                await self.collect(max_bytes=rng.choice((0, 0, 1000)), orphan_age_s=600.0)

    async def collect(self, *, max_bytes: int | None, orphan_age_s: float) -> None:
        """A round as the command makes it, with an index of its own."""
        world = self.world
        world.disk.indexes.pop(INDEXES / self.process.name / SPEC.name, None)
        self.catalog = self._new_catalog()
        await self.catalog.open()
        clock = world.clock(self.process)
        lease = await acquire(self.store, "gc", "c", lease_s=60.0, sleep=asyncio.sleep)  # type: ignore[arg-type]
        scan = await scan_chunks(self.store, SPEC.name, self.catalog, orphan_age_s=orphan_age_s, now=clock())  # type: ignore[arg-type]
        source = Source(SPEC.name, self.catalog.iter_chunks)
        plan = make_plan([source], Policy(clock(), max_bytes=max_bytes), [*scan.forgotten, *scan.orphans])
        pace = Pace(GRACE_S, 60.0, world.loop.time, clock, asyncio.sleep)
        outcome = await execute(plan, {SPEC.name: Place(self, 2)}, self.store, lease, pace)  # type: ignore[arg-type]
        world.counts["collections"] += 1
        world.counts["kept at the second look"] += outcome.kept
        await lease.release()


async def _freeze(world: World, actors: Sequence[Actor]) -> None:
    """Processes that stop for longer than any deadline, as with SIGSTOP."""
    while True:
        await asyncio.sleep(world.rng.expovariate(1 / 60))
        actor = world.rng.choice(list(actors))
        actor.process.frozen_until = world.loop.time() + world.rng.choice((5.0, 20.0, 50.0, 200.0))
        world.counts["freezes"] += 1


async def _simulate(world: World) -> None:
    rng = world.rng
    writers = [Writer(world, 1 + at, f"writer {at}") for at in range(3)]
    readers = [Reader(world, 11 + at, f"reader {at}") for at in range(2)]
    collector = Collector(world, 21, "collector")
    actors: list[Actor] = [*writers, *readers, collector]
    for victim in rng.sample(actors, rng.randint(0, 3)):
        victim.process.dies_at_write = rng.randint(1, 16)
        victim.process.dies_after = rng.random() < 0.5
    freezer = asyncio.create_task(_freeze(world, actors)) if rng.random() < 0.5 else None
    await asyncio.gather(*(actor.live() for actor in actors))
    if freezer is not None:
        freezer.cancel()
    world.calm = True
    await _settle(world, [*writers, *readers], collector)


async def _settle(world: World, agents: Sequence[Actor], collector: Collector) -> None:
    """No more faults: what is wrong is repaired, what is garbage collected, and then everything agrees."""
    for actor in [*agents, collector]:
        actor.process.dies_at_write = None
        if actor.process.dead:
            await actor._reborn()
        await actor._open()
    reader = next(actor for actor in agents if isinstance(actor, Reader))
    for _ in range(3):  # a repair leaves objects to collect, a late deletion a record to repair
        await asyncio.sleep(2000)
        await _poll_all(reader)
        for chunk in CHUNKS:
            if reader.catalog.chunk(chunk.chunk_id) is not None:
                await reader.read_chunk(chunk.chunk_id)
        stored = world.store.stored()
        held, said = await objects_held(world), objects_of(stored)
        if held == said:
            break
        await collector.collect(max_bytes=None, orphan_age_s=0.0)
    must(said <= held, "a record is left whose object is gone")
    must(held <= said, "an object is left that no record names")
    for actor in agents:
        await _poll_all(actor)
        _check_agrees(actor, stored)
    await _check_snapshots(world, agents)


async def _check_snapshots(world: World, agents: Sequence[Actor]) -> None:
    """Folded and swept, the catalog still says the same to an agent that knows nothing."""
    await agents[0].catalog.compact(force=True)
    await asyncio.sleep(GRACE_S + 1)
    spare = CHUNKS[0]
    world.objects_ever |= objects_of({spare.chunk_id: spare})
    await agents[1].catalog.publish([spare])
    await _poll_all(agents[0])
    swept = await agents[0].catalog.compact(force=True)
    must(swept.failed == 0, "a sweep failed")
    fresh = Reader(world, 99, "fresh")
    await fresh.catalog.open()
    _check_agrees(fresh, world.store.stored())


async def _poll_all(actor: Actor) -> None:
    actor.catalog._syncer.wants_full = True
    await actor.catalog.poll()


def _check_agrees(actor: Actor, stored: dict[bytes, ChunkAdded]) -> None:
    held = {entry.chunk_id: entry.added for entry in actor.catalog.iter_chunks()}
    must(held == stored, f"{actor.process.name} does not agree with what was published")


def simulate(seed: int) -> Counter[str]:
    """One schedule. Returns what happened in it; raises Violation."""
    disk = Disk()
    counts: Counter[str] = Counter()

    async def main(loop: SeededLoop, rng: random.Random) -> None:
        store = RecordingStore(clock=loop.time, page_keys=5)
        world = World(
            loop, rng, store, disk, rng.choice((0.01, 0.05, 0.25)), rng.choice((0.0, 0.02, 0.1)), counts=counts
        )
        await _simulate(world)

    unchecked = mock.patch.multiple(memory, check_key=lambda key: key, check_prefix=lambda prefix: prefix)  # a third
    with use_dict_indexes(disk), unchecked:
        run_seeded(seed, main, T0)
    counts["schedules"] = 1
    return counts
