"""Carrying plans out beside other collectors and writers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.bucket_fill import DAY_S, NOW, Filler, SettableClock, chain, filling, small_namespace

from s3kv.format.keys import parse_chunk_key
from s3kv.format.records import ChunkAdded
from s3kv.gc.execute import Outcome, Pace, Place, execute
from s3kv.gc.lease import Lease, LeaseHeld, LeaseLost, acquire
from s3kv.gc.plan import Plan, Policy, Source, make_plan
from s3kv.gc.scan import scan_chunks
from s3kv.store.memory import MemoryStore

SPEC = small_namespace(groups=2)


@dataclass
class World:
    store: MemoryStore
    filler: Filler
    clock: SettableClock
    ticks: float = 0.0

    async def sleep(self, seconds: float) -> None:
        self.ticks += seconds

    async def lease(self, holder: str) -> Lease:
        return await acquire(self.store, "gc", holder, lease_s=60.0, sleep=self.sleep)

    def plan(self) -> Plan:
        source = Source(SPEC.name, self.filler.catalog.iter_chunks)
        return make_plan([source], Policy(NOW + 90 * DAY_S, max_idle_s=30 * DAY_S))

    async def carry_out(self, plan: Plan, lease: Lease, grace_s: float = 300.0) -> Outcome:
        pace = Pace(grace_s, 60.0, lambda: self.ticks, self.clock, self.sleep)
        return await execute(plan, {SPEC.name: Place(self.filler.catalog, 2)}, self.store, lease, pace)

    async def stored(self) -> set[bytes]:
        keys = [parse_chunk_key(meta.key) async for page in self.store.list("ns/") for meta in page]
        return {key.chunk_id for key in keys if key is not None}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    store, clock = MemoryStore(), SettableClock()
    async with filling(store, SPEC, tmp_path, clock) as filler:
        yield World(store, filler, clock)


async def put(world: World, name: str) -> ChunkAdded:
    return await world.filler.put_chunk(chain(SPEC, name, 2), 0, 2)


async def test_objects_go_only_after_the_grace_period(world: World) -> None:
    chunk = await put(world, "a")
    seen: list[tuple[float, bool]] = []
    sleep = world.sleep

    async def watching(seconds: float) -> None:
        await sleep(seconds)
        seen.append((world.ticks, chunk.chunk_id in await world.stored()))
        assert world.filler.catalog.chunk(chunk.chunk_id) is None  # forgotten first

    world.sleep = watching  # type: ignore[method-assign]
    outcome = await world.carry_out(world.plan(), await world.lease("one"))
    assert seen[-1] == (300.0, True)
    assert (outcome.chunks, outcome.objects, outcome.bytes) == (1, 2, chunk.size)
    assert await world.stored() == set()


async def test_a_collector_that_was_stalled_stops_before_it_deletes(world: World) -> None:
    chunk = await put(world, "a")
    first = await world.lease("one")
    plan = world.plan()
    await world.lease("two")  # after a minute without a sign of the first
    world.ticks = 1000.0
    with pytest.raises(LeaseLost):
        await world.carry_out(plan, first)
    assert await world.stored() == {chunk.chunk_id}


async def test_a_second_collector_is_kept_out_while_the_first_works(world: World) -> None:
    await put(world, "a")
    first = await world.lease("one")
    refused: list[str] = []
    sleep = world.sleep

    async def competing(seconds: float) -> None:
        await sleep(seconds)
        if not refused:

            async def other_sleep(_: float) -> None:
                await first.renew()

            try:
                await acquire(world.store, "gc", "two", lease_s=60.0, sleep=other_sleep)
            except LeaseHeld as error:
                refused.append(str(error))

    world.sleep = competing  # type: ignore[method-assign]
    assert (await world.carry_out(world.plan(), first)).chunks == 1
    assert refused and "one" in refused[0]


async def test_what_is_added_after_the_plan_is_not_touched(world: World) -> None:
    await put(world, "a")
    plan = world.plan()
    late = await put(world, "b")
    await world.carry_out(plan, await world.lease("one"))
    assert await world.stored() == {late.chunk_id}


async def test_a_scan_tells_forgotten_orphaned_and_young(world: World) -> None:
    from s3kv.format.records import DeleteReason

    kept, forgotten = await put(world, "kept"), await put(world, "forgotten")
    orphan = await world.filler.put_chunk(chain(SPEC, "orphan", 1), 0, 1, publish=False)
    await world.store.put(f"ns/{SPEC.name}/chunk/README", b"not ours")
    await world.filler.catalog.forget([forgotten.chunk_id], DeleteReason.COLLECTED)
    modified = (await world.store.head(f"ns/{SPEC.name}/chunk/README")).modified
    young = await scan_chunks(world.store, SPEC.name, world.filler.catalog, orphan_age_s=60.0, now=modified)
    assert [each.chunk_id for each in young.forgotten] == [forgotten.chunk_id]
    assert (young.orphans, young.young, young.foreign, young.chunks) == ([], 1, 1, 3)
    old = await scan_chunks(world.store, SPEC.name, world.filler.catalog, orphan_age_s=60.0, now=modified + 61)
    assert [(each.chunk_id, each.size, each.objects) for each in old.orphans] == [(orphan.chunk_id, orphan.size, 2)]
    assert kept.chunk_id not in {each.chunk_id for each in [*old.orphans, *old.forgotten]}
