"""Policy park in virtual time: what is promised, what counts, and when a promise has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.virtual_agent import VirtualAgent, in_virtual_time

from s3kv.client.protocol import Matched, PromiseState


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
