"""A collection's plan over 1,000,000 chunks, and a listing of 1,000,000 keys, in processes of their own."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from benchmarks.harness import MIB, Options, Report, at_most, cpu_seconds
from benchmarks.synthetic import CHAIN_BLOCKS, CHUNK_BLOCKS, OBJECT_BYTES, SPEC, alone, chain_hashes_of, chains_for
from s3kv.format.header import chunk_id
from s3kv.format.keys import chunk_key
from s3kv.gc.plan import Policy, Source, make_plan
from s3kv.gc.scan import scan_chunks
from s3kv.store.base import LIST_PAGE_KEYS, ObjectMeta
from s3kv.store.memory import MemoryStore

GIB = 1 << 30


def measure(options: Options) -> Report:
    count = 100_000 if options.quick else 1_000_000
    report = Report(f"collection: plan of {count:,} chunks of {CHUNK_BLOCKS} blocks, listing of {count:,} keys")
    planned, listed = alone(plan, count), alone(list_keys, count)
    for what, found in ((f"plan of {count:,} chunks", planned), (f"listing of {count:,} keys", listed)):
        report.row(what, found["seconds"], "s")
        report.row(f"{what}: CPU", found["cpu"], "s", goal=at_most(60, "figure"))
        report.row(f"{what}: peak memory", found["peak_rss"] / MIB, "MiB", goal=at_most(1024, "figure"))
    report.row("of the plan: making the synthetic entries, twice", planned["generating"], "s")
    report.note("One thread: on an idle machine the wall time is the CPU time, which is what the goal is held against.")
    report.data = {"plan": planned, "list": listed}
    return report


class _Group(NamedTuple):
    size: int
    header_size: int


class _Added(NamedTuple):
    """What the planner reads of a record."""

    chunk_id: bytes
    parent: bytes
    start_block: int
    blocks: tuple[bytes, ...]
    shards: tuple[int, ...]
    groups: tuple[_Group, ...]
    size: int


class _Entry(NamedTuple):
    added: _Added
    touched_hour: int


def plan(count: int) -> dict[str, Any]:
    """Half of the bytes have to go, and what was idle for 800 hours."""
    hashes = chain_hashes_of(chains_for(count * CHUNK_BLOCKS), 3)
    groups = (_Group(OBJECT_BYTES, 64),)
    spent = [0.0]

    def entries() -> Any:
        made, parent = 0, bytes(16)
        for chain in hashes:
            for start in range(0, CHAIN_BLOCKS, CHUNK_BLOCKS):
                began = time.perf_counter()
                if not start:
                    parent = bytes(16)
                raw = chain[start : start + CHUNK_BLOCKS].tobytes()
                blocks = tuple(raw[at : at + 16] for at in range(0, len(raw), 16))
                name = chunk_id(SPEC.digest, parent, blocks)
                entry = _Entry(_Added(name, parent, start, blocks, (0,), groups, OBJECT_BYTES), 480_000 - made % 1000)
                spent[0] += time.perf_counter() - began
                yield entry
                parent = blocks[-1]
                made += 1
                if made == count:
                    return

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    policy = Policy(480_001 * 3600.0, max_bytes=count * OBJECT_BYTES // 2, max_idle_s=800 * 3600.0, superseded=True)
    cpu, began = cpu_seconds(), time.perf_counter()
    made = make_plan([Source(SPEC.name, entries)], policy)
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    assert count // 4 < len(made) < count
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": seconds, "cpu": cpu, "peak_rss": peak * 1024, "before_rss": before * 1024, "generating": spent[0],
        "doomed": len(made),
    }  # fmt: skip


class _Pages(MemoryStore):
    """A store whose listing is made up page by page, in the order of keys."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    async def list(self, prefix: str, start_after: str | None = None) -> AsyncIterator[list[ObjectMeta]]:
        step = (1 << 64) // self._count
        for at in range(0, self._count, LIST_PAGE_KEYS):
            names = ((at + i) * step for i in range(min(LIST_PAGE_KEYS, self._count - at)))
            keys = (chunk_key(SPEC.name, name.to_bytes(8, "big") + bytes(8), 0) for name in names)
            yield [ObjectMeta(key, OBJECT_BYTES, '"e"', 1.0) for key in keys]


class _Known:
    """A catalog that knows nine of ten chunks."""

    unread = 0

    def chunk(self, chunk_id: bytes) -> object | None:
        return self if chunk_id[7] % 10 else None

    def tombstone(self, chunk_id: bytes) -> None:
        return None


def list_keys(count: int) -> dict[str, Any]:
    cpu, began = cpu_seconds(), time.perf_counter()
    scan = asyncio.run(scan_chunks(_Pages(count), SPEC.name, _Known(), orphan_age_s=60, now=1e9))
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    assert scan.chunks == count
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "cpu": cpu, "peak_rss": peak * 1024, "orphans": len(scan.orphans)}
