"""One namespace of an agent in this process, with its chunks on nginx: no engine, no socket, real everything else.

nginx has no listings, so the catalog's log goes to a folder on tmpfs; chunk objects alone go to nginx.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.agent_process import chain
from benchmarks.origins import TMPFS, Origin
from s3kv.agent.namespace import Namespace
from s3kv.agent.service import Agent
from s3kv.identity import ROOT, NamespaceSpec
from s3kv.settings import Settings, StoreSettings
from s3kv.store import Store, open_store
from s3kv.store.base import Body
from s3kv.store.wrapper import StoreWrapper


class ChunksElsewhere(StoreWrapper):
    """Chunk objects in `chunks`, everything else in `inner`."""

    def __init__(self, inner: Store, chunks: Store) -> None:
        super().__init__(inner)
        self._chunks = chunks

    def _for(self, key: str) -> Store:
        return self._chunks if "/chunk/" in key else self._inner

    async def get_into(self, key: str, out: memoryview, offset: int = 0) -> int:
        return await self._for(key).get_into(key, out, offset)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
        await self._for(key).get_ranges(key, ranges, outs)

    async def put(self, key: str, body: Body) -> str:
        return await self._for(key).put(key, body)

    async def put_if_absent(self, key: str, body: Body) -> str:
        return await self._for(key).put_if_absent(key, body)

    async def close(self) -> None:
        await self._chunks.close()
        await super().close()


class TierNode:
    """`do` runs a coroutine on the node's loop, which stands still between calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop, namespace: Namespace) -> None:
        self._loop = loop
        self.namespace = namespace
        self.spec: NamespaceSpec = namespace.spec
        self._seed = 0

    def do(self, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await work

        return self._loop.run_until_complete(run())

    def fresh_chain(self, blocks: int) -> list[bytes]:
        self._seed += 1
        return chain(self.spec, self._seed, blocks)

    def reserve(self, hashes: Sequence[bytes]) -> list[Any]:
        """Slots as an engine would get them; what lies in them is what it would have copied."""
        part = self.spec.parts[0].shard
        held = self.namespace.directory.reserve(part, ROOT, 0, hashes, "engine")
        assert None not in held, "the tier has no room"
        return held

    async def save(self, held: Sequence[Any]) -> None:
        """Commit, and return once all of it is durable and in the catalog."""
        from array import array

        slots, tickets = array("I", (each.slot for each in held)), array("I", (each.ticket for each in held))
        self.namespace.commit(self.spec.parts[0].shard, slots, tickets)
        _, lost = await self.namespace.drain(120)
        assert lost == 0

    async def load(self, hashes: Sequence[bytes]) -> None:
        """From the bucket to resident and verified."""
        resident, _ = await self.namespace.prefetch(hashes, 120)
        assert resident == len(hashes), f"{resident} blocks of {len(hashes)} came"

    def forget(self) -> None:
        directory = self.namespace.directory
        directory.drop(list(directory.resident()))

    def fill(self, content: bytes) -> None:
        """Every slot holds `content`, so that each has memory and a round pays for none."""
        for arena in self.namespace.arenas.values():
            for slot in range(arena.slots):
                arena.view(slot)[: len(content)] = content


@contextmanager
def tier_node(origin: Origin, spec: NamespaceSpec, slots: int, **sections: dict[str, Any]) -> Iterator[TierNode]:
    with TemporaryDirectory(prefix="s3kv-bench-", dir=TMPFS) as name:
        folder = Path(name)
        slot_bytes = sum(part.slot_bytes for part in spec.parts)
        values: dict[str, dict[str, Any]] = {
            "agent": {"socket": folder / "agent.sock"},
            "tier": {"capacity_bytes": slots * slot_bytes, "dirty_max_fraction": 1.0},
            "upload": {"codec": "raw", "threads": 2},
            "catalog": {"index_dir": folder / "index", "map_bytes": 1 << 28, "publish_interval_s": 0.05},
            "store": {"url": f"file://{folder / 'store'}"},
        }
        for section, changes in sections.items():
            values[section] = {**values.get(section, {}), **changes}
        settings = Settings.model_validate(values)
        loop = asyncio.new_event_loop()
        chunks = open_store(origin.settings("agent"))
        rest = open_store(StoreSettings(url=f"file://{folder / 'store'}"))
        node = loop.run_until_complete(_start(settings, spec, ChunksElsewhere(rest, chunks), loop))
        try:
            yield node
        finally:
            node.do(node.namespace.close())
            node.do(rest.close())
            loop.close()


async def _start(settings: Settings, spec: NamespaceSpec, store: Store, loop: asyncio.AbstractEventLoop) -> TierNode:
    namespace = Namespace(spec, Agent(settings, store=store)._resources(), pinned=False)
    await namespace.catalog_open.wait()
    return TierNode(loop, namespace)
