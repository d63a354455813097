"""An agent's upload (committed slots to durable chunks and records) and fetch (bucket to verified slots), codec raw.

The peers move the same objects, as many at once, with raw obstore: puts of the same slots, gets copied into a buffer.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import obstore

from benchmarks.agent_process import one_page_spec
from benchmarks.harness import MIB, Options, Report, Series, at_least, race
from benchmarks.origins import Origin, nginx
from benchmarks.raw_clients import obstore_store
from benchmarks.tier_node import TierNode, tier_node

BLOCK = 2 * MIB
CHUNK_BLOCKS = 16
AT_ONCE = 8


def measure(options: Options) -> Report:
    chunks = 4 if options.quick else 8
    blocks = chunks * CHUNK_BLOCKS
    report = Report(f"agent: {chunks} chunks of {CHUNK_BLOCKS} blocks of {BLOCK // MIB} MiB, codec raw")
    with nginx() as origins:
        for origin in origins:
            with tier_node(origin, one_page_spec(BLOCK), 2 * blocks) as node:
                node.fill(os.urandom(BLOCK))
                _measure(report, origin, node, chunks, options.rounds(12))
    report.note("Chunks lie on nginx, the catalog's log in a folder on tmpfs: nginx cannot list.")
    return report


def _measure(report: Report, origin: Origin, node: TierNode, chunks: int, rounds: int) -> None:
    blocks = chunks * CHUNK_BLOCKS
    raw = _Raw(origin, node, chunks)
    stored = node.fresh_chain(blocks)
    node.do(node.save(node.reserve(stored)))
    held: list[Any] = []

    def prepare(name: str) -> None:
        assert origin.log is not None
        origin.log.write_text("")
        node.forget()
        held[:] = node.reserve(node.fresh_chain(blocks)) if name == "save" else []

    ups = race({"save": lambda: node.do(node.save(held)), "raw": raw.put}, rounds, before=prepare)
    downs = race({"load": lambda: node.do(node.load(stored)), "raw": raw.get}, rounds, before=prepare)
    size = blocks * BLOCK
    _rows(report, f"{origin.name}: upload", ups["save"], "raw obstore put", ups["raw"], size)
    _rows(report, f"{origin.name}: fetch", downs["load"], "raw obstore get + copy", downs["raw"], size)


def _rows(report: Report, what: str, of: Series, peer: str, to: Series, size: int) -> None:
    report.rates(what, of, peer, to, size, goal=at_least(0.85))


class _Raw:
    """Objects of one chunk's size, from the node's own slots and into a buffer of the same size."""

    def __init__(self, origin: Origin, node: TierNode, chunks: int) -> None:
        self._node = node
        self._store = obstore_store(origin, "raw")
        arena = node.namespace.arenas[node.spec.parts[0].shard]
        self._bodies = [
            [arena.view(slot) for slot in range(at * CHUNK_BLOCKS, (at + 1) * CHUNK_BLOCKS)] for at in range(chunks)
        ]
        self._outs = [memoryview(bytearray(CHUNK_BLOCKS * BLOCK)) for _ in range(chunks)]
        self.put()

    def put(self) -> None:
        async def one(number: int) -> None:
            body: Any = self._bodies[number]
            await obstore.put_async(self._store, f"chunk-{number}", body, use_multipart=False)

        self._all(one)

    def get(self) -> None:
        async def one(number: int) -> None:
            data = await (await obstore.get_async(self._store, f"chunk-{number}")).bytes_async()
            self._outs[number][:] = memoryview(data)

        self._all(one)

    def _all(self, one: Any) -> None:
        places = asyncio.Semaphore(AT_ONCE)

        async def limited(number: int) -> None:
            async with places:
                await one(number)

        async def run() -> None:
            await asyncio.gather(*(limited(number) for number in range(len(self._bodies))))

        self._node.do(run())
