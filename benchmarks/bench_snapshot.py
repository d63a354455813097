"""Loading a catalog snapshot of 1,000,000 and 10,000,000 blocks into a new index, against reading its bytes."""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import MIB, Options, Report, at_most, cpu_seconds, memory_kib
from benchmarks.synthetic import SPEC, alone, write_snapshot
from s3kv.catalog.catalog import Catalog
from s3kv.settings import CatalogSettings, StoreSettings
from s3kv.store import open_store

SIZES = (1_000_000, 10_000_000)


def measure(options: Options) -> Report:
    report = Report("catalog snapshot: load into a new index")
    for blocks in SIZES[:1] if options.quick else SIZES:
        with tempfile.TemporaryDirectory(prefix="s3kv-bench-", dir="/var/tmp") as name:
            folder = Path(name)
            size = alone(write_snapshot, folder, blocks)
            reading = alone(read_bytes, folder)
            found = alone(load, folder)
            used = alone(look_up, folder, True)
            uncached = alone(look_up, folder, False)
        _rows(report, blocks, size, reading, found, used, uncached)
    report.note(
        "Anonymous memory is what the process keeps for itself; mapped pages of the index are the kernel's cache and "
        "go when memory is wanted elsewhere. RSS counts both, and the kernel maps up to 15 cached neighbours of a page "
        "that is touched (fault-around), so it depends on what happens to be cached."
    )
    return report


def _rows(
    report: Report,
    blocks: int,
    size: int,
    reading: float,
    found: dict[str, Any],
    used: dict[str, Any],
    uncached: dict[str, Any],
) -> None:
    name = f"{blocks:,} blocks"
    report.row(
        f"{name}: load", found["seconds"], "s", peer=f"reading its {size / MIB:.0f} MiB", peer_figure=reading,
        ratio=found["seconds"] / reading,
    )  # fmt: skip
    report.row(f"{name}: load, CPU", found["cpu"], "s")
    report.row(f"{name}: index on disk", found["index_bytes"] / MIB, "MiB")
    goal = at_most(300, "figure") if blocks == SIZES[-1] else None
    report.row(f"{name}: peak anonymous memory of the load", found["peak_anon"] / MIB, "MiB", goal=goal)
    report.row(f"{name}: peak RSS of the load", found["peak_rss"] / MIB, "MiB")
    what = f"{name}: RSS after opening it again and 64 look-ups of 1,024"
    report.row(f"{what}, all of it cached", used["rss"] / MIB, "MiB", goal=goal)
    report.row(f"{what}, none cached", uncached["rss"] / MIB, "MiB", goal=goal)
    report.row(f"{name}: opening it again", used["open_s"], "s")
    report.data[str(blocks)] = {"size": size, "reading_s": reading, **found, **used, "uncached": uncached}


def read_bytes(folder: Path) -> float:
    began = time.perf_counter()
    for path in (folder / "store").rglob("snap/*"):
        with path.open("rb", buffering=0) as file:
            while file.read(4 << 20):
                pass
    return time.perf_counter() - began


def _catalog(folder: Path) -> Catalog:
    store = open_store(StoreSettings(url=f"file://{folder / 'store'}"))
    return Catalog(store, SPEC, folder / "index", agent_id=7, clock=time.time, settings=CatalogSettings())


def load(folder: Path) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        catalog = _catalog(folder)
        watch = _Watch()
        cpu, began = cpu_seconds(), time.perf_counter()
        watching = asyncio.create_task(watch.run())
        await catalog.open()
        seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
        watching.cancel()
        stats = catalog.stats()
        assert stats["chunks"] > 0, stats
        await catalog.close()
        on_disk = sum(path.stat().st_blocks * 512 for path in (folder / "index").rglob("*") if path.is_file())
        return {
            "seconds": seconds, "cpu": cpu, "index_bytes": on_disk, "blocks": stats["blocks"],
            "peak_anon": watch.peak_anon * 1024, "before_anon": watch.first * 1024,
            "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }  # fmt: skip

    return asyncio.run(run())


class _Watch:
    def __init__(self) -> None:
        self.first = self.peak_anon = memory_kib()["RssAnon"]

    async def run(self) -> None:
        while True:
            self.peak_anon = max(self.peak_anon, memory_kib()["RssAnon"])
            await asyncio.sleep(0.02)


def look_up(folder: Path, cached: bool) -> dict[str, Any]:
    if not cached:
        _drop_from_cache(folder / "index")

    async def run() -> dict[str, Any]:
        catalog = _catalog(folder)
        began = time.perf_counter()
        await catalog.open()
        opened = time.perf_counter() - began
        for chain in np.load(folder / "kept.npy"):
            assert len(catalog.lookup([each.tobytes() for each in chain])) == len(chain)
        memory = memory_kib()
        await catalog.close()
        return {"open_s": opened, "rss": memory["VmRSS"] * 1024, "anon": memory["RssAnon"] * 1024}

    return asyncio.run(run())


def _drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*.mdb"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only clean pages go
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
