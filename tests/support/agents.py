"""A real agent in a thread of the test's process, and engines that use it through the real socket."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3kv.agent.node import Node
from s3kv.agent.service import Agent
from s3kv.client.engine import LeaderClient, Offer, WorkerClient
from s3kv.client.protocol import Report, Status
from s3kv.identity import ROOT, GroupSpec, NamespaceSpec, RegionSpec, chain_hashes
from s3kv.settings import Settings
from s3kv.store.base import Store

PAGE = 1024


def small_spec(*, shards: int = 1, groups: int = 2, model: str = "test") -> NamespaceSpec:
    group = GroupSpec((0,), None, (RegionSpec(PAGE),))
    return NamespaceSpec(model, "weights", "bfloat16", 4, (group,) * groups, shards=shards)


def small_chain(spec: NamespaceSpec, seed: int, blocks: int) -> list[bytes]:
    tokens = [seed * 7919 + index for index in range(blocks * spec.tokens_per_block)]
    return chain_hashes(spec.digest, spec.tokens_per_block, tokens)


def content_of(block: bytes, part: int, size: int) -> bytes:
    """The KV of a block: a function of its hash, so a wrong byte shows."""
    return random.Random(block + bytes([part])).randbytes(size)


def agent_settings(folder: Path, **sections: dict[str, Any]) -> Settings:
    """Quick intervals and a small tier; `sections` override."""
    values: dict[str, dict[str, Any]] = {
        "agent": {"socket": folder / "agent.sock", "autostart": False, "call_timeout_s": 5.0, "drain_s": 5.0},
        "tier": {"capacity_bytes": 1 << 20},
        "load": {"wait_ms_per_1k_tokens": 1e6, "wait_cap_ms": 20_000},
        "upload": {"seal_age_s": 0.05, "seal_grace_s": 0.01, "threads": 2},
        "catalog": {"poll_interval_s": 0.05, "publish_interval_s": 0.01, "map_bytes": 1 << 26},
        "store": {"url": f"file://{folder / 'store'}"},
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
    return Settings.model_validate(values)


class RunningAgent:
    """Runs until `stop`. `call` runs a coroutine function on its loop."""

    def __init__(self, settings: Settings, store: Store | None = None, seed: int = 0) -> None:
        self.settings = settings
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store, self._seed = store, seed
        self.agent: Agent | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        self._ready.wait(20)
        if self.failure is not None:
            raise self.failure

    def _main(self) -> None:
        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            self.agent = Agent(self.settings, store=self._store, rng=random.Random(self._seed))
            await self.agent.run(self._ready.set)

        try:
            asyncio.run(run())
        except BaseException as error:
            self.failure = error
        finally:
            self._ready.set()

    def call(self, function: Any) -> Any:
        """The result of `function()` (awaited if need be), run on the agent's loop."""

        async def run() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def until(self, condition: Callable[[], object], turns: int = 4000) -> None:
        """Let the agent's loop run until `condition` holds; bounded in turns of the loop, not in time."""

        async def wait() -> bool:
            for _ in range(turns):
                if condition():
                    return True
                await asyncio.sleep(0.002)
            return False

        assert self.call(wait)

    def drain(self, deadline_s: float = 10.0) -> tuple[int, int]:
        """See `Node.drain`."""
        result: tuple[int, int] = self.call(lambda: self._node.drain(deadline_s))
        return result

    def forget(self) -> int:
        """Everything goes from host memory; see `Node.forget`."""
        count: int = self.call(lambda: self._node.forget(""))
        return count

    @property
    def _node(self) -> Node:
        assert self.agent is not None and self.agent.node is not None
        return self.agent.node

    def stop(self, deadline_s: float = 5.0) -> None:
        assert self.agent is not None
        if self._thread.is_alive():  # it may have stopped by itself
            with contextlib.suppress(RuntimeError):
                self.call(lambda: self.agent.stop(deadline_s))  # type: ignore[union-attr]
        self._thread.join(30)
        assert not self._thread.is_alive()

    def namespace(self, spec: NamespaceSpec) -> Any:
        return self._node.namespaces[spec.digest]

    def totals(self) -> Any:
        assert self.agent is not None
        return self.agent.metrics


@contextlib.contextmanager
def running_agent(settings: Settings, store: Store | None = None, seed: int = 0) -> Iterator[RunningAgent]:
    agent = RunningAgent(settings, store, seed)
    try:
        yield agent
    finally:
        agent.stop(0.0)


@dataclass
class FakeEngine:
    """An engine without a model: its KV is a function of the block hash, so a wrong byte shows."""

    spec: NamespaceSpec
    leader: LeaderClient
    workers: list[WorkerClient]

    @classmethod
    def start(cls, settings: Settings, spec: NamespaceSpec, name: str = "engine") -> FakeEngine:
        ranks = spec.shards
        leader = LeaderClient(settings, spec, ranks=ranks, engine_id=name)
        workers = [WorkerClient(settings, spec, rank=rank, ranks=ranks, engine_id=name) for rank in range(ranks)]
        assert leader.connect()
        for worker in workers:
            assert worker.connect()
        return cls(spec, leader, workers)

    def chain(self, seed: int, blocks: int) -> list[bytes]:
        return small_chain(self.spec, seed, blocks)

    def content(self, block: bytes, part: int, size: int) -> bytes:
        return content_of(block, part, size)

    def save(self, hashes: Sequence[bytes], *, first: int = 0, commit: bool = True) -> int:
        """Save `hashes[first:]` on every rank; returns how many blocks rank 0 wrote."""
        parent = hashes[first - 1] if first else ROOT
        written = 0
        for worker in self.workers:
            for part in worker.write_parts:
                reservation = worker.reserve(part, parent, first, hashes[first:])
                arena = worker.arena(reservation.epoch, part)
                indices = [index for index, slot in enumerate(reservation.slots) if slot >= 0]
                for index in indices:
                    assert arena is not None
                    view = arena.view(reservation.slots[index])
                    view[:] = self.content(hashes[first + index], part, len(view))
                if commit:
                    worker.commit(part, reservation, indices)
                written = len(indices) if worker is self.workers[0] else written
        self.settle()
        return written

    def settle(self) -> None:
        """Returns once the agent has carried out what the workers told it; messages of one connection go in order."""
        for worker in self.workers:
            connection = worker._connection
            if connection is not None and not connection.closed:
                connection.call(Status(connection.next_id()), Report, timeout_s=20)

    def match(self, hashes: Sequence[bytes], first: int = 0) -> Offer:
        return self.leader.match(hashes, first_block=first)

    def check(self, hashes: Sequence[bytes], offer: Offer, first: int = 0) -> None:
        """Every offered page holds what was saved for its block."""
        offsets = [
            (part.shard, part.group_offset(g), size)
            for part in self.spec.parts
            for g, size in enumerate(part.group_bytes)
        ]
        for worker in self.workers:
            for block, slot in zip(hashes[first:], offer.slots, strict=False):
                for shard, offset, size in offsets:
                    if shard in worker.read_parts:
                        arena = worker.arena(offer.epoch, shard)
                        assert arena is not None
                        wanted = self.content(block, shard, arena.slot_bytes)[offset : offset + size]
                        assert bytes(arena.view(slot)[offset : offset + size]) == wanted

    def release(self, offer: Offer) -> None:
        for worker in self.workers:
            worker.release(offer.lease, offer.epoch)
        self.settle()

    def load(self, hashes: Sequence[bytes]) -> int:
        """Match, check every byte, give back; returns the blocks offered."""
        offer = self.match(hashes)
        self.check(hashes, offer)
        self.release(offer)
        return len(offer.slots)

    def close(self) -> None:
        self.leader.close()
        for worker in self.workers:
            worker.close()
