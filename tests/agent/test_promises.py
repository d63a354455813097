"""Policy park: a promise is kept, or said to have failed, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.agents import FakeEngine, RunningAgent, agent_settings, running_agent, small_spec

from s3kv.client.engine import Offer
from s3kv.store.memory import MemoryStore


def stored(agent: RunningAgent, engine: FakeEngine, seeds: range, blocks: int) -> list[list[bytes]]:
    """Chains that the bucket holds and host memory does not."""
    agent.until(agent.namespace(engine.spec).catalog_open.is_set)
    chains = [engine.chain(seed, blocks) for seed in seeds]
    for chain in chains:
        assert engine.save(chain) == blocks
        assert agent.drain()[1] == 0
        agent.forget()
    return chains


def kept(agent: RunningAgent, engine: FakeEngine, offer: Offer) -> bool:
    """Whether the promise is kept once no fetch is under way; asserts that it has not failed."""
    agent.until(lambda: agent.namespace(engine.spec).fetcher.running_chunks == 0)
    state = engine.workers[0].promised(offer.lease, offer.epoch)
    assert not state.failed
    return state.ready


def parking(folder: Path, slots: int, pinned: float) -> Any:
    return agent_settings(
        folder,
        load={"policy": "park", "max_pinned_fraction": pinned},
        tier={"capacity_bytes": slots * small_spec().parts[0].slot_bytes, "dirty_max_fraction": 1.0},
    )


def test_a_promise_waits_while_other_offers_have_all_pins(tmp_path: Path) -> None:
    settings, spec = parking(tmp_path, 16, 0.5), small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        first, second = stored(agent, engine, range(2), 6)
        offers = [engine.match(chain) for chain in (first, second)]
        assert [offer.pending for offer in offers] == [6, 6]
        assert kept(agent, engine, offers[0])
        assert not kept(agent, engine, offers[1]), "eight of sixteen slots may be pinned"
        engine.release(offers[0])
        assert kept(agent, engine, offers[1])
        engine.release(offers[1])
        assert agent.call(lambda: len(agent.namespace(spec).promises)) == 0
        engine.close()


def test_no_more_is_promised_than_may_be_pinned(tmp_path: Path) -> None:
    settings, spec = parking(tmp_path, 16, 0.5), small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        (chain,) = stored(agent, engine, range(1), 12)
        offer = engine.match(chain)
        assert offer.pending == 8
        assert kept(agent, engine, offer)
        engine.release(offer)
        engine.close()


@pytest.mark.parametrize("ready", [False, True])
def test_promises_end_with_the_processes_that_would_read_them(tmp_path: Path, ready: bool) -> None:
    import os

    settings, spec = parking(tmp_path, 16, 0.5), small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        (chain,) = stored(agent, engine, range(1), 6)
        offer = engine.match(chain)
        if ready:
            assert kept(agent, engine, offer)
        agent.call(lambda: agent.agent.node.exited(os.getpid()))  # type: ignore[union-attr]
        assert agent.call(lambda: len(agent.namespace(spec).promises)) == 0
        assert agent.call(lambda: agent.namespace(spec).directory.counters()).pinned == 0
        engine.close()
