"""The same work at 10 times the blocks and 10 times the agents: does its cost grow linearly, or less?"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bench_catalog import look_up_times
from benchmarks.bench_directory import BLOCKS, fresh, resident_chain
from benchmarks.bench_gc import plan
from benchmarks.harness import Options, Report, at_most, race
from benchmarks.synthetic import CHUNK_BLOCKS, SPEC, alone, entries
from s3kv.catalog.catalog import Catalog
from s3kv.format.records import ChunkAdded
from s3kv.settings import CatalogSettings
from s3kv.store.memory import MemoryStore
from s3kv.tier import Directory

RECORDS = 20  # of each agent, in one segment


def measure(options: Options) -> Report:
    report = Report("growth: cost at 10 times the size; linear is 10, the goal 11")
    smaller = 10 if options.quick else 1
    work: list[tuple[str, str, list[int], Callable[[int], float]]] = [
        ("match of 1,024 blocks", "blocks resident", [26_624, 266_240], lambda n: _match(n, options.rounds(200))),
        (
            "catalog look-up of 1,024 blocks",
            "blocks stored",
            [100_000 // smaller, 1_000_000 // smaller],
            lambda n: look_up_times(n, options.rounds(200))["lookup"].cpu_s,
        ),
        ("poll of a segment from each agent", "agents", [10, 100], _poll),
        ("plan of a collection", "chunks", [10_000, 100_000], lambda n: float(alone(plan, n)["cpu"])),
    ]
    for what, unit, sizes, function in work:
        points = [{"size": size, "cpu_s": function(size)} for size in sizes]
        grown = points[1]["cpu_s"] / points[0]["cpu_s"]
        report.row(
            f"{what}: {sizes[1]:,} {unit}", points[1]["cpu_s"] * 1e3, "ms CPU", peer=f"{sizes[0]:,} {unit}",
            peer_figure=points[0]["cpu_s"] * 1e3, ratio=grown, goal=at_most(11),
        )  # fmt: skip
        report.data[what] = {"unit": unit, "points": points}
    report.note("Growth of a snapshot's load from 1,000,000 to 10,000,000 blocks is in the benchmark of snapshots.")
    return report


def _match(resident: int, rounds: int) -> float:
    directory = Directory(resident, (0,), slot_bytes_all_parts=4096, dirty_max_slots=0)
    chains = [resident_chain(directory, BLOCKS, name) for name in range(resident // BLOCKS)]
    rng, keys = random.Random(7), fresh(chains[0])

    def draw(name: str) -> None:
        keys[:] = fresh(rng.choice(chains))

    def match() -> None:
        directory.release(directory.match(keys, readers={0: "a"}).lease_id)

    return race({"match": match}, rounds, before=draw)["match"].cpu_s


def _poll(agents: int) -> float:
    """CPU seconds in which one more agent hears of a segment from each of `agents`."""
    records = [entry.added for entry in entries(agents * RECORDS)]
    with tempfile.TemporaryDirectory(prefix="s3kv-bench-") as name:
        return asyncio.run(_publish_and_poll(Path(name), records, agents))


async def _publish_and_poll(folder: Path, records: list[ChunkAdded], agents: int) -> float:
    store = MemoryStore()
    settings = CatalogSettings(map_bytes=1 << 30, compact_after_segments=1_000_000)

    def catalog(number: int) -> Catalog:
        return Catalog(store, SPEC, folder / str(number), agent_id=number, clock=time.time, settings=settings)

    reader = catalog(0)
    await reader.open()
    writer = catalog(1)
    await writer.open()
    for number in range(agents):
        # One catalog writes all agents' segments under their ids: what a reader sees is the same.
        writer._agent_id = number + 1
        await writer.publish(records[number * RECORDS : (number + 1) * RECORDS])
    cpu = time.process_time()
    await reader.poll()
    cpu = time.process_time() - cpu
    counts: dict[str, Any] = reader.stats()
    assert counts["blocks"] == agents * RECORDS * CHUNK_BLOCKS, counts
    await reader.close()
    await writer.close()
    return cpu
