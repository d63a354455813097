"""What a match waits for, and what becomes of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.agents import FakeEngine, RunningAgent, agent_settings, running_agent, small_spec

from s3kv.store.memory import MemoryStore


def until(agent: RunningAgent, condition: Callable[[], bool]) -> None:
    async def wait() -> bool:
        for _ in range(4000):
            if condition():
                return True
            await asyncio.sleep(0.002)
        return False

    assert agent.call(wait)


def test_a_match_waits_for_what_comes_behind_blocks_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, spec = agent_settings(tmp_path, upload={"chunk_target_bytes": 1}), small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        namespace = agent.namespace(spec)
        until(agent, namespace.catalog_open.is_set)
        chain = engine.chain(1, 4)
        engine.save(chain)
        assert agent.call(lambda: agent.agent.node.drain(10.0))[1] == 0  # type: ignore[union-attr]
        assert agent.call(lambda: namespace.directory.drop([chain[1], chain[3]])) == 2
        read = namespace.fetcher._read

        async def slowly_at_the_end(fetch: Any, places: Any) -> None:
            if fetch.blocks == (chain[3],):
                while namespace.fetcher.on_its_way(chain[1]):
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.02)
            await read(fetch, places)

        monkeypatch.setattr(namespace.fetcher, "_read", slowly_at_the_end)
        assert engine.load(chain) == 4
        engine.close()
