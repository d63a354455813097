"""How often a namespace lists the catalog's log: a bucket charges for each listing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.virtual_agent import VirtualAgent, in_virtual_time

from s3kv.agent.namespace import UNUSED_POLLS_EVERY

LONG_S = 600.0


def polls(agent: VirtualAgent) -> int:
    count = agent.namespace.catalog.stats()["polls"]
    assert isinstance(count, int)
    return count


def leave(agent: VirtualAgent) -> None:
    engines = agent.namespace.engines
    engines.leave("engine", 100, rank=0, leader=True)
    for rank in range(agent.spec.shards):
        engines.leave("engine", 100 + rank, rank=rank, leader=False)
    assert len(engines) == 0


def test_a_namespace_that_nobody_uses_polls_a_twelfth_as_often(tmp_path: Path) -> None:
    """The interval is a second here. An engine that comes is served by a catalog of one interval ago at the most."""

    async def work(agent: VirtualAgent) -> None:
        await agent.opened()
        await asyncio.sleep(LONG_S)
        used = polls(agent)
        assert 0.8 * LONG_S < used < 1.25 * LONG_S
        leave(agent)
        await asyncio.sleep(LONG_S)
        unused = polls(agent) - used
        assert 0.7 * LONG_S < unused * UNUSED_POLLS_EVERY < 1.3 * LONG_S
        agent.namespace.engines.join("engine", agent.spec.shards, 100, rank=0, leader=True)
        before = polls(agent)
        await asyncio.sleep(1.3)
        assert polls(agent) > before

    in_virtual_time(tmp_path, work)


def test_what_still_waits_to_be_stored_counts_as_use(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        await agent.opened()
        agent.save(agent.chain(1, 3))
        leave(agent)
        before = polls(agent)
        await asyncio.sleep(20.0)
        assert polls(agent) - before > 20 / 1.25
        await agent.stored(agent.chain(1, 3))

    in_virtual_time(tmp_path, work, upload={"seal_age_s": 60.0, "seal_grace_s": 60.0})
