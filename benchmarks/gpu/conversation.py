"""Conversations of growing turns under a tier too small for them: time to first token of every turn.

The turns are those of `trace`. The tier holds about a quarter of what the conversations need, so it has lost most of
one when that goes on, and the bucket serves it. Before each turn what the last one saved is stored: in the trace there
are minutes between them.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.model import Model, Shape
from benchmarks.gpu.serving import Pages, Serving, attach
from benchmarks.gpu.shape_8b import agent, bucket_folder, settings_for, settle, status
from benchmarks.gpu.trace import requests
from s3kv.sim.install import install

TIER_BYTES = 8 << 30
LATENCY_S = 0.02


@dataclass(frozen=True)
class Case:
    """A network, and how long a match may wait for it."""

    name: str
    bytes_per_s: float
    wait_ms_per_1k_tokens: float
    wait_cap_ms: float


CASES = (
    Case("5 GB/s, waits of the defaults", 5e9, 10.0, 300.0),
    Case("5 GB/s, 40 ms for 1,000 tokens", 5e9, 40.0, 5000.0),
    Case("10 GB/s, 40 ms for 1,000 tokens", 10e9, 40.0, 5000.0),
)

Turn = dict[str, Any]


def run(rng: random.Random) -> dict[str, Any]:
    shape = Shape()
    trace = requests(rng, shape.vocab)
    blocks = max(len(prompt) for _, _, prompt in trace) // shape.block + 64
    model, pages = Model(shape, blocks), Pages(blocks)
    rows: list[Turn] = [
        {"conversation": conversation, "turn": turn, "tokens": len(prompt)} for conversation, turn, prompt in trace
    ]
    bare = Serving(model, None, pages)
    for row, (_, _, prompt) in zip(rows, trace, strict=True):
        bare.first_token(prompt[::-1])  # kernels of this length are chosen and loaded before anything is timed
        row["computed_s"] = bare.first_token(prompt)[0]
    print("computed", round(sum(row["computed_s"] for row in rows), 2), "s", flush=True)
    longest = {conversation: prompt for conversation, _, prompt in trace}
    result = {
        "tier_bytes": TIER_BYTES, "latency_s": LATENCY_S, "rows": rows,
        "needed_bytes": sum(map(len, longest.values())) // shape.block * shape.block_bytes, "cases": [],
    }  # fmt: skip
    for case in CASES:
        result["cases"].append(_serve(case, model, pages, trace, rows))
    return result


def _serve(case: Case, model: Model, pages: Pages, trace: list[Any], rows: list[Turn]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, bucket_folder() as bucket, install("both", False):
        folder = Path(name)
        settings = settings_for(folder, bucket, TIER_BYTES, case.wait_ms_per_1k_tokens, case.wait_cap_ms)
        with agent(settings, folder, LATENCY_S, case.bytes_per_s) as connection:
            driver = attach(model, settings, folder)
            serving = Serving(model, driver, pages)
            for row, (_, _, prompt) in zip(rows, trace, strict=True):
                settle(connection, serving)
                seconds, loaded = serving.first_token(prompt)
                row.setdefault("s3kv", []).append({"s": seconds, "loaded": loaded})
            totals = status(connection)["totals"]
            driver.shutdown()
    later = [row for row in rows if row["turn"]]
    pairs = [(row["computed_s"], row["s3kv"][-1]["s"]) for row in later]
    found = {
        "name": case.name, "bytes_per_s": case.bytes_per_s, "wait_ms_per_1k_tokens": case.wait_ms_per_1k_tokens,
        "wait_cap_ms": case.wait_cap_ms, "fetched_blocks": totals["fetched_blocks"],
        "loaded_fraction_of_later_turns": sum(row["s3kv"][-1]["loaded"] for row in later)
        / sum(row["tokens"] for row in later),
        "later_turns": len(later), "faster": sum(served < computed for computed, served in pairs),
        "computed_s": sum(computed for computed, _ in pairs), "s3kv_s": sum(served for _, served in pairs),
        "median_speedup": statistics.median(computed / served for computed, served in pairs),
    }  # fmt: skip
    print(found, flush=True)
    return found
