"""Policy park in virtual time: what is promised, what counts, and when a promise has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.agents import small_spec
from support.virtual_agent import VirtualAgent, in_virtual_time, unpack

from s3kv.catalog.faults import IndexDamaged
from s3kv.client.protocol import Matched, PromiseState
from s3kv.format.keys import chunk_key
from s3kv.format.records import DeleteReason
from s3kv.identity import ROOT
from s3kv.store.faults import Fault


async def stored(agent: VirtualAgent, blocks: int) -> list[bytes]:
    """A chain that the bucket holds and host memory does not."""
    chain = agent.chain(1, blocks)
    assert agent.save(chain) == blocks
    await agent.stored(chain)
    await agent.quiet()
    agent.forget()
    return chain


async def asked(agent: VirtualAgent, hashes: Sequence[bytes], *, park: bool = True, min_blocks: int = 1) -> Matched:
    return await agent.namespace.match(
        agent.engine, 100, hashes, 1000.0, 1000.0, park=park, min_blocks=min_blocks, identity=1
    )


async def settled(agent: VirtualAgent, offer: Matched) -> PromiseState:
    """The promise once no fetch is under way."""
    await agent.quiet()
    return agent.namespace.promised(1, offer.lease)


async def arrived(agent: VirtualAgent, hashes: Sequence[bytes]) -> Matched:
    """A promise whose blocks were fetched, and which nobody has asked for yet."""
    offer = await asked(agent, hashes)
    assert offer.pending == len(hashes)
    await agent.quiet()
    return offer


def found(agent: VirtualAgent) -> dict[str, int]:
    (metric,) = agent.metrics.matched_blocks.collect()
    return {each.labels["found"]: int(each.value) for each in metric.samples if each.name.endswith("_total")}


@pytest.mark.parametrize("park", [False, True])
def test_a_parked_load_counts_and_keeps_its_chunks_in_use_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, park: bool
) -> None:
    async def work(agent: VirtualAgent) -> None:
        chain = await stored(agent, 4)
        catalog = agent.namespace.catalog
        touched: list[bytes] = []
        monkeypatch.setattr(catalog, "touch", touched.extend)
        offer = await asked(agent, [*chain, *agent.chain(2, 3)], park=park)
        if park:
            assert offer.pending == 4 and found(agent) == {"nowhere": 3, "tier": 0}
            for _ in range(2):  # every rank asks
                assert (await settled(agent, offer)).ready
        assert found(agent) == {"nowhere": 3, "tier": 4}
        await asyncio.sleep(0.1)
        assert touched == [catalog.lookup(chain)[0].chunk_id]
        agent.namespace.release(offer.lease, -1)

    in_virtual_time(tmp_path, work)


def test_promises_of_fewer_blocks_than_are_worth_offering_are_not_made(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        chain = await stored(agent, 4)
        declined = await asked(agent, chain, min_blocks=5)
        assert (declined.lease, declined.pending, len(agent.namespace.promises)) == (0, 0, 0)
        agent.forget()
        assert (await asked(agent, chain, min_blocks=4)).pending == 4

    in_virtual_time(tmp_path, work)


def test_a_promise_outlasts_a_moment_without_room(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        chain = await stored(agent, 4)
        offer = await arrived(agent, chain)
        places = agent.namespace.directory.reserve(0, ROOT, 0, agent.chain(2, 8), 100)
        assert all(places), "a save takes every slot"
        state = agent.namespace.promised(1, offer.lease)
        assert (state.ready, state.failed) == (False, False)
        taken = [place for place in places if place is not None]
        slots, tickets = zip(*taken, strict=True)
        agent.namespace.abandon(0, unpack(list(slots)), unpack(list(tickets)))
        assert not agent.namespace.promised(1, offer.lease).ready
        assert (await settled(agent, offer)).ready
        agent.namespace.release(offer.lease, -1)
        agent.check_at_rest()

    slot_bytes = small_spec().parts[0].slot_bytes
    in_virtual_time(
        tmp_path,
        work,
        tier={"capacity_bytes": 8 * slot_bytes, "dirty_max_fraction": 1.0},
        load={"max_pinned_fraction": 1.0},
    )


def test_a_promise_outlasts_the_making_of_a_new_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(agent: VirtualAgent) -> None:
        chain = await stored(agent, 4)
        offer = await arrived(agent, chain)
        agent.forget()
        catalog = agent.namespace.catalog

        def damaged(*_: object) -> None:
            raise IndexDamaged("a page")

        with monkeypatch.context() as patch:
            patch.setattr("s3kv.catalog.index.Index.lookup", damaged)
            assert not agent.namespace.promised(1, offer.lease).failed
            assert catalog.stats()["index_damaged"]
        await agent.stored(chain)
        assert not agent.namespace.promised(1, offer.lease).failed
        assert (await settled(agent, offer)).ready

    in_virtual_time(tmp_path, work)


def test_a_promise_has_failed_once_its_blocks_are_gone_from_the_bucket(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        chain = await stored(agent, 4)
        offer = await arrived(agent, chain)
        agent.forget()
        catalog = agent.namespace.catalog
        assert await catalog.forget([catalog.lookup(chain)[0].chunk_id], DeleteReason.COLLECTED) == 1
        assert agent.namespace.promised(1, offer.lease).failed

    in_virtual_time(tmp_path, work)


@pytest.mark.parametrize("may_write", [True, False])
@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_a_promise_has_failed_once_its_blocks_are_found_bad_whether_or_not_that_can_be_told(
    tmp_path: Path, damage: str, may_write: bool
) -> None:
    async def work(agent: VirtualAgent) -> None:
        chain = await stored(agent, 4)
        key = chunk_key(agent.spec.name, agent.namespace.catalog.lookup(chain)[0].chunk_id, 0)
        whole = await agent.memory.get(key, 1 << 20)
        if damage == "missing":
            await agent.memory.delete([key])
        else:
            await agent.memory.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
        if not may_write:
            agent.plan.expect("put", *[Fault.DENIED] * 100)
        offer = await asked(agent, chain)
        for _ in range(2):  # every rank asks
            assert (await settled(agent, offer)).failed
        assert agent.total("repairs") == 1
        if not may_write:  # by now somebody else has stored it again
            await agent.memory.put(key, whole)
            again = await asked(agent, chain)
            assert (await settled(agent, again)).ready

    in_virtual_time(tmp_path, work)
