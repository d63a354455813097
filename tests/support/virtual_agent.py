"""An agent's core (node, namespace, uploads, fetches, catalog) in virtual time: no socket, no thread, no real clock.

Minutes of outage run in milliseconds and alike every time. The store is a MemoryStore behind a FaultStore behind the
guard with its deadlines, retries and breaker: what the real agent has.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from s3kv.agent.engines import Engine
from s3kv.agent.metrics import AgentMetrics
from s3kv.agent.namespace import Namespace
from s3kv.agent.node import Node
from s3kv.agent.resources import Resources
from s3kv.agent.weights import ByteSemaphore
from s3kv.client.protocol import Matched, unpack_u32
from s3kv.identity import ROOT, NamespaceSpec
from s3kv.settings import Settings
from s3kv.store.faults import FaultPlan, FaultStore
from s3kv.store.guard import GuardedStore, Limits
from s3kv.store.memory import MemoryStore
from s3kv.tier.budget import NodeBudget
from support.agents import agent_settings, content_of, small_chain, small_spec
from support.virtual_loop import SeededLoop

EPOCH_S = 1_700_000_000.0


class VirtualAgent:
    """One node with one namespace and one attached engine of as many ranks as the namespace has shards."""

    def __init__(self, settings: Settings, spec: NamespaceSpec, plan: FaultPlan, memory: MemoryStore) -> None:
        loop = asyncio.get_running_loop()
        self.settings, self.spec, self.plan, self.memory = settings, spec, plan, memory
        self.metrics = AgentMetrics()
        self.store = GuardedStore(
            FaultStore(memory, plan),
            Limits.from_settings(settings.store),
            clock=loop.time,
            rng=random.Random(0),
            events=self.metrics,
        )
        self.node = Node(
            Resources(
                settings=settings,
                store=self.store,
                budget=NodeBudget(settings.tier.capacity_bytes),
                metrics=self.metrics,
                threads=ThreadPoolExecutor(1),  # never started: the loop does its work on the spot
                upload_bytes=ByteSemaphore(settings.upload.inflight_bytes),
                fetch_bytes=ByteSemaphore(settings.fetch.inflight_bytes),
                index_dir=settings.agent.socket.parent / "index",
                agent_id=1,
                clock=loop.time,
                wall_clock=lambda: EPOCH_S + loop.time(),
                rng=random.Random(0),
            ),
            epoch=1,
        )
        self.namespace: Namespace = self.node._namespace(spec, pinned=False)
        self.engine: Engine = self.namespace.engines.join("engine", spec.shards, 100, rank=0, leader=True)
        for rank in range(spec.shards):
            self.namespace.engines.join("engine", spec.shards, 100 + rank, rank=rank, leader=False)
            self.engine.mapped[rank] += 1

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def chain(self, seed: int, blocks: int) -> list[bytes]:
        return small_chain(self.spec, seed, blocks)

    def save(self, hashes: Sequence[bytes]) -> int:
        """Every rank writes what it may; returns how many blocks there was room for."""
        written = 0
        for shard, arena in self.namespace.arenas.items():
            places = self.namespace.directory.reserve(shard, ROOT, 0, hashes, 100)
            chosen = [(block, place) for block, place in zip(hashes, places, strict=True) if place is not None]
            for block, place in chosen:
                view = arena.view(place.slot)
                view[:] = content_of(block, shard, len(view))
            slots, tickets = [place.slot for _, place in chosen], [place.ticket for _, place in chosen]
            self.namespace.commit(shard, unpack(slots), unpack(tickets))
            written = len(chosen)
        self.namespace.finish(hashes[-1])
        return written

    async def load(self, hashes: Sequence[bytes], *, wait_s: float = 1000.0) -> int:
        """Blocks offered within the budget; every byte of them is checked, then they are given back."""
        matched: Matched = await self.namespace.match(
            self.engine, 100, hashes, wait_s, wait_s, park=False, min_blocks=1, identity=1
        )
        slots = unpack_u32(matched.slots)
        for block, slot in zip(hashes, slots, strict=False):
            for part in self.spec.parts:
                for group, size in enumerate(part.group_bytes):
                    arena, offset = self.namespace.arenas[part.shard], part.group_offset(group)
                    wanted = content_of(block, part.shard, arena.slot_bytes)[offset : offset + size]
                    assert bytes(arena.view(slot)[offset : offset + size]) == wanted, "wrong bytes were offered"
        self.namespace.release(matched.lease, -1)
        return len(slots)

    async def stored(self, hashes: Sequence[bytes], seconds: float = 600.0) -> None:
        """Until the catalog knows all of these blocks."""
        end = self.now() + seconds
        while len(self.namespace.catalog.lookup(hashes)) < len(hashes):
            assert self.now() < end, "the blocks were never stored"
            await asyncio.sleep(0.05)

    async def opened(self) -> None:
        await self.namespace.catalog_open.wait()

    def forget(self) -> None:
        self.node.forget("")

    def check_at_rest(self) -> None:
        """Nothing is held, and the directory is whole."""
        self.namespace.directory.check()
        counters = self.namespace.directory.counters()
        held = (counters.pinned, counters.arriving, counters.dirty, counters.doomed, counters.quarantined)
        assert held == (0, 0, 0, 0, 0), counters
        assert self.namespace.fetcher.running_chunks == self.namespace.uploader.queued_chunks == 0
        assert self.node.r.upload_bytes.used == self.node.r.fetch_bytes.used == 0
        assert self.namespace.packer.waiting_blocks == 0

    async def quiet(self) -> None:
        """Until what is under way has ended."""
        while (
            self.namespace.fetcher.running_chunks
            or self.namespace.uploader.queued_chunks
            or self.namespace.packer.waiting_blocks
        ):
            await asyncio.sleep(0.1)

    def total(self, name: str) -> int:
        return self.metrics.total(getattr(self.metrics, name))


def unpack(values: list[int]) -> Any:
    from array import array

    return array("I", values)


def in_virtual_time(
    folder: Path,
    work: Callable[[VirtualAgent], Awaitable[None]],
    *,
    plan: FaultPlan | None = None,
    memory: MemoryStore | None = None,
    shards: int = 1,
    seed: int = 0,
    **sections: dict[str, Any],
) -> None:
    """Runs `work(agent)`; then the agent closes. Settings are the defaults but for a small tier and quick seals."""
    settings = _settings(folder, sections)

    async def main() -> None:
        agent = VirtualAgent(settings, small_spec(shards=shards), plan or FaultPlan(), memory or MemoryStore())
        try:
            await work(agent)
        finally:
            await agent.node.close()

    with asyncio.Runner(loop_factory=lambda: SeededLoop(random.Random(seed), 1000.0)) as runner:
        runner.run(main())


def _settings(folder: Path, sections: dict[str, dict[str, Any]]) -> Settings:
    quick = agent_settings(folder)
    values = {
        "agent": {"socket": quick.agent.socket},
        "tier": {"capacity_bytes": 1 << 20},
        "upload": {"seal_age_s": 0.05, "seal_grace_s": 0.01},
        "catalog": {"poll_interval_s": 1.0, "publish_interval_s": 0.01, "map_bytes": 1 << 24},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return Settings.model_validate(values)
