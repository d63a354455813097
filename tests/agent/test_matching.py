"""What a match waits for, and what becomes of its answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.agents import FakeEngine, agent_settings, running_agent, small_spec

from s3kv.agent.server import _Frames
from s3kv.client import protocol as p
from s3kv.client.control import Control
from s3kv.errors import Transient
from s3kv.store.memory import MemoryStore


def test_a_match_waits_for_what_comes_behind_blocks_that_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, spec = agent_settings(tmp_path, upload={"chunk_target_bytes": 1}), small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        namespace = agent.namespace(spec)
        agent.until(namespace.catalog_open.is_set)
        chain = engine.chain(1, 4)
        engine.save(chain)
        assert agent.drain()[1] == 0
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


def test_a_prefetch_looks_a_chain_up_a_few_times_and_not_with_every_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, spec = agent_settings(tmp_path, upload={"chunk_target_bytes": 1}), small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        namespace = agent.namespace(spec)
        agent.until(namespace.catalog_open.is_set)
        chain = engine.chain(1, 64)
        engine.save(chain)
        assert agent.drain(20.0)[1] == 0
        agent.forget()
        lookup = namespace.catalog.lookup
        looked_up: list[int] = []

        def counted(hashes: list[bytes]) -> Any:
            looked_up.append(len(hashes))
            return lookup(hashes)

        monkeypatch.setattr(namespace.catalog, "lookup", counted)
        assert agent.call(lambda: namespace.prefetch(chain, 20.0)) == (64, 0)
        assert sum(looked_up) <= 4 * 64
        engine.close()


def test_a_prefetch_of_more_than_host_memory_brings_what_fits_and_ends(tmp_path: Path) -> None:
    slot_bytes = small_spec().parts[0].slot_bytes
    settings = agent_settings(tmp_path, tier={"capacity_bytes": 8 * slot_bytes, "dirty_max_fraction": 1.0})
    spec = small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        namespace = agent.namespace(spec)
        agent.until(namespace.catalog_open.is_set)
        chain = engine.chain(1, 12)
        for first in (0, 6):
            engine.save(chain[: first + 6], first=first)
            assert agent.drain(20.0)[1] == 0
        agent.forget()
        assert agent.call(lambda: namespace.prefetch(chain, 1e6)) == (8, 4)
        engine.close()


def test_a_prefetch_ends_with_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds what has come, for hours if its deadline says so."""
    settings, spec = agent_settings(tmp_path, upload={"chunk_target_bytes": 1}), small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        namespace = agent.namespace(spec)
        agent.until(namespace.catalog_open.is_set)
        chain = engine.chain(1, 4)
        engine.save(chain)
        assert agent.drain()[1] == 0
        agent.call(lambda: namespace.directory.drop(chain[2:]))

        async def away(*_: Any) -> None:
            raise Transient("the store is away")

        def held() -> int:
            return sum(block.kept for block in namespace.directory._table.occupied.values())

        with monkeypatch.context() as patch:
            patch.setattr(namespace.fetcher, "_read", away)
            control = Control.open(settings.agent)
            control._connection.post(p.Prefetch(1, "", p.join_hashes(chain), 3600.0))
            agent.until(lambda: held() == 2)
            control._connection.close()
            agent.until(lambda: held() == 0)
        assert engine.load(chain) == 4
        engine.close()


@pytest.mark.parametrize("policy", ["wait", "park"])
def test_a_lease_whose_answer_cannot_be_delivered_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Nobody heard of it, so nobody reads its slots; the engine's process may live for weeks."""
    settings, spec = agent_settings(tmp_path, load={"policy": policy}), small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        namespace = agent.namespace(spec)
        agent.until(namespace.catalog_open.is_set)
        chain = engine.chain(1, 4)
        engine.save(chain)
        assert agent.drain()[1] == 0
        if policy == "park":
            agent.forget()
        held: list[int] = []
        write = _Frames.write

        async def lost(self: _Frames, reply: p.Reply, fds: list[int] | None = None) -> None:
            if isinstance(reply, p.Matched):
                held.append(namespace.directory.counters().pinned + len(namespace.promises))
                raise BrokenPipeError
            await write(self, reply, fds)

        monkeypatch.setattr(_Frames, "write", lost)
        assert engine.match(chain).slots == []
        assert held == [4 if policy == "wait" else 1]
        agent.until(lambda: namespace.directory.counters().pinned + len(namespace.promises) == 0)
        engine.close()


def test_a_reservation_whose_answer_cannot_be_delivered_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, spec = agent_settings(tmp_path), small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        namespace = agent.namespace(spec)
        chain = engine.chain(1, 4)
        worker = engine.workers[0]
        write = _Frames.write

        async def lost(self: _Frames, reply: p.Reply, fds: list[int] | None = None) -> None:
            if isinstance(reply, p.Reserved):
                assert namespace.directory.counters().arriving == 4
                raise BrokenPipeError
            await write(self, reply, fds)

        with monkeypatch.context() as patch:
            patch.setattr(_Frames, "write", lost)
            worker.reserve(worker.write_parts[0], bytes(16), 0, chain)
            agent.until(lambda: namespace.directory.counters().arriving == 0)
        assert engine.save(chain) == 4
        engine.close()
