"""Microseconds of the executor's thread a call, with 256 active requests: bench_engine's iterations on this device."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.bench_engine import REQUESTS, both

STEPS = 512


def run(rng: random.Random) -> dict[str, Any]:
    result: dict[str, Any] = {"requests": REQUESTS, "steps": STEPS}
    for kind, found in zip(("none completing", "8 completing"), both("cuda", STEPS), strict=True):
        result[kind] = {
            name: {"median_us": each.wall_s * 1e6, "p99_us": each.percentile(0.99) * 1e6}
            for name, each in found.items()
        }
        print(kind, {name: round(each["median_us"], 1) for name, each in result[kind].items()}, flush=True)
    return result
