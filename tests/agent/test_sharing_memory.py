"""Several namespaces on one node, as engines make them: the leader attaches first, then the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.agents import FakeEngine, agent_settings, running_agent, small_spec

from s3kv.client.engine import LeaderClient, WorkerClient
from s3kv.settings import Settings
from s3kv.store.memory import MemoryStore
from s3kv.tier.arena import Arena


def test_a_second_namespace_is_served_when_the_first_has_used_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's budget shares the memory; what the first one's blocks take up must not count against it twice."""
    settings = agent_settings(tmp_path)
    with running_agent(settings, MemoryStore()) as agent:
        first = FakeEngine.start(settings, small_spec())
        monkeypatch.setattr("s3kv.tier.memory.available_bytes", lambda *_: settings.tier.capacity_bytes // 4)
        second = FakeEngine.start(settings, small_spec(model="other"), "second")
        chain = second.chain(1, 4)
        assert second.save(chain) == 4
        assert second.load(chain) == 4
        assert len(agent.call(lambda: agent.agent.node.namespaces)) == 2  # type: ignore[union-attr]
        for engine in (first, second):
            engine.close()


def pinned_slots(settings: Settings, model: str) -> tuple[int, bool]:
    """Slots of the arena that rank 0 gets, and whether it may be registered whole."""
    spec, mapped = small_spec(model=model), []

    def take(arena: Arena, may_pin: bool) -> None:
        mapped.append((arena.slots, may_pin))

    leader = LeaderClient(settings, spec, ranks=1, engine_id=model)
    worker = WorkerClient(settings, spec, rank=0, ranks=1, engine_id=model, pinned=True, on_arena=take)
    assert leader.connect() and worker.connect()
    return mapped[0]


def test_namespaces_that_pin_their_memory_get_the_share_that_the_setting_says(tmp_path: Path) -> None:
    slots = 64
    capacity = slots * small_spec().parts[0].slot_bytes
    settings = agent_settings(tmp_path, tier={"capacity_bytes": capacity, "namespaces": 2})
    with running_agent(settings, MemoryStore()):
        assert pinned_slots(settings, "one") == (slots // 2, True)
        assert pinned_slots(settings, "two") == (slots // 2, True)
