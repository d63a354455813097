"""When an engine unmaps the arena of an agent that has ended: the next agent may need that memory to start at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agent_process import AgentProcess
from support.agents import FakeEngine, agent_settings, running_agent, small_spec

from s3kv.client.engine import WorkerClient
from s3kv.identity import ROOT

SPEC = small_spec()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    made = AgentProcess(agent_settings(tmp_path, agent={"reconnect_s": 1e-6}))
    yield made
    made.kill()


@pytest.fixture
def engine(agent: AgentProcess) -> Iterator[FakeEngine]:
    made = FakeEngine.start(agent.settings, SPEC)
    made.save(made.chain(1, 4))
    yield made
    made.close()


def maps_anything(engine: FakeEngine) -> bool:
    """After another try to reach the agent, which is gone."""
    (worker,) = engine.workers
    assert not worker.connect()
    return bool(worker._arenas)


def test_of_an_agent_that_has_ended_nothing_stays_mapped(agent: AgentProcess, engine: FakeEngine) -> None:
    assert engine.load(engine.chain(1, 4)) == 4
    agent.kill()
    assert not maps_anything(engine)


@pytest.mark.parametrize("by", ["worker", "leader"])
def test_what_was_offered_can_be_loaded_until_it_is_given_back(
    agent: AgentProcess, engine: FakeEngine, by: str
) -> None:
    offer = engine.match(engine.chain(1, 4))
    agent.kill()
    assert engine.match(engine.chain(1, 4)).slots == []
    assert maps_anything(engine)
    engine.check(engine.chain(1, 4), offer)
    (worker,) = engine.workers
    (worker if by == "worker" else engine.leader).release(offer.lease, offer.epoch)
    assert not maps_anything(engine)


def test_what_is_being_saved_can_be_written_until_each_slot_is_answered_for(
    agent: AgentProcess, engine: FakeEngine
) -> None:
    (worker,) = engine.workers
    part = worker.write_parts[0]
    reservation = worker.reserve(part, ROOT, 0, engine.chain(2, 3))
    agent.kill()
    worker.commit(part, reservation, [0, 2])
    assert maps_anything(engine)
    worker.abandon(part, reservation, [1])
    assert not maps_anything(engine)


def test_without_the_leader_nothing_is_known_of_offers(agent: AgentProcess, engine: FakeEngine) -> None:
    """Its client is in another process, or belongs to an engine of several ranks."""
    alone = WorkerClient(agent.settings, SPEC, rank=0, ranks=1, engine_id="another")
    assert alone.connect()
    agent.kill()
    assert maps_anything(FakeEngine(SPEC, engine.leader, [alone]))
    alone.close()


def test_a_rank_among_several_keeps_what_its_leader_may_have_been_offered(agent: AgentProcess) -> None:
    engine = FakeEngine.start(agent.settings, small_spec(shards=2), name="two")
    agent.kill()
    for worker in engine.workers:
        assert maps_anything(FakeEngine(engine.spec, engine.leader, [worker]))
    engine.close()


def test_a_connection_that_broke_says_nothing_of_its_agent(tmp_path: Path) -> None:
    """It lives (in this process), and may offer again what it holds."""
    settings = agent_settings(tmp_path)
    with running_agent(settings):
        engine = FakeEngine.start(settings, SPEC)
        (worker,) = engine.workers
        epoch, part = worker.epoch, worker.read_parts[0]
        arena = worker.arena(epoch, part)
        assert worker._connection is not None
        worker._connection.close()
        assert worker.connect()
        assert worker.arena(epoch, part) is arena
        engine.close()
