"""Catalog look-up of a chain of 1,024 blocks among 1,000,000, against lmdb alone over the same index."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from benchmarks.bench_directory import fresh
from benchmarks.bench_snapshot import _catalog, load
from benchmarks.harness import Options, Report, Series, at_most, race, ratio
from benchmarks.synthetic import alone, write_snapshot


def measure(options: Options) -> Report:
    report = Report("catalog look-up of 1,024 blocks among 1,000,000")
    blocks = 100_000 if options.quick else 1_000_000
    series = look_up_times(blocks, options.rounds(400))
    report.row(
        "Catalog.lookup", series["lookup"].wall_s * 1e3, "ms", peer="lmdb alone: getmulti",
        peer_figure=series["getmulti"].wall_s * 1e3, ratio=ratio(series["lookup"], series["getmulti"]),
    )  # fmt: skip
    report.times("Catalog.lookup", series["lookup"], "lmdb alone: get a key", series["get"], goal=at_most(1.5))
    report.times("Catalog.lookup, CPU", series["lookup"], "lmdb alone: get a key", series["get"], clock="cpu")
    report.row("Catalog.lookup a block", series["lookup"].wall_s * 1e6 / 1024, "µs")
    return report


def look_up_times(blocks: int, rounds: int) -> dict[str, Series]:
    with tempfile.TemporaryDirectory(prefix="s3kv-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        alone(write_snapshot, folder, blocks)
        alone(load, folder)
        kept = np.load(folder / "kept.npy")
        chains = [[each.tobytes() for each in chain] for chain in kept]
        return asyncio.run(_race(folder, chains, rounds))


async def _race(folder: Path, chains: list[list[bytes]], rounds: int) -> dict[str, Series]:
    catalog = _catalog(folder)
    await catalog.open()
    rng, keys = random.Random(5), fresh(chains[0])
    assert catalog._index is not None
    env, table = catalog._index._env, catalog._index.tables["blocks"]

    def draw(name: str) -> None:
        keys[:] = fresh(rng.choice(chains))

    def lookup() -> None:
        assert len(catalog.lookup(keys)) == len(keys)

    contestants: dict[str, Callable[[], Any]] = {
        "lookup": lookup,
        "get": lambda: _get_each(env, table, keys),
        "getmulti": lambda: _get_together(env, table, keys),
    }
    series = race(contestants, rounds, before=draw)
    await catalog.close()
    return series


def _get_each(env: lmdb.Environment, table: Any, keys: list[bytes]) -> None:
    with env.begin(db=table) as txn:
        get = txn.get
        found = [get(key) for key in keys]
    assert all(found)


def _get_together(env: lmdb.Environment, table: Any, keys: list[bytes]) -> None:
    with env.begin(db=table) as txn, txn.cursor() as cursor:
        assert len(cursor.getmulti(keys)) == len(keys)
