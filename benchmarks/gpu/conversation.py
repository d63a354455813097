"""Conversations of growing turns under a tier too small for them: time to first token of every turn.

The text is the project's own documentation, a token a byte, one section a turn; several conversations take turns, so
that the tier (a quarter of what they need) has lost a conversation when it goes on, and the bucket serves it.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.model import Model, Shape
from benchmarks.gpu.serving import Pages, Serving, attach
from benchmarks.gpu.shape_8b import agent, settings_for, status
from s3kv.sim.install import install

CONVERSATIONS, TURNS = 6, 7
TIER_BYTES = 1700 << 20
LATENCY_S, BYTES_PER_S = 0.02, 5e9
DOCUMENTS = ("docs/format.md", "README.md", "terraform/README.md", "docs/runtime.md")


def sections() -> list[bytes]:
    text = b"".join(Path(name).read_bytes() for name in DOCUMENTS if Path(name).exists())
    parts = [b"\n## " + part for part in text.split(b"\n## ")]
    return [part[:3000] for part in parts if len(part) > 400]


def turns() -> list[list[list[int]]]:
    """`[conversation][turn]` the whole prompt of that turn."""
    parts, made = sections(), []
    for number in range(CONVERSATIONS):
        prompt: list[int] = list(b"Conversation %d" % number)
        prompts = []
        for turn in range(TURNS):
            prompt = prompt + list(parts[(number * TURNS + turn) % len(parts)])
            prompts.append(prompt)
        made.append(prompts)
    return made


def run(rng: random.Random) -> dict[str, Any]:
    shape = Shape()
    blocks = 2048
    model = Model(shape, blocks)
    conversations = turns()
    times: dict[str, list[float]] = {"computed": [], "s3kv": []}
    rows = []
    with tempfile.TemporaryDirectory() as name, install("both", False):
        folder = Path(name)
        settings = settings_for(folder, TIER_BYTES)
        with agent(settings, folder, LATENCY_S, BYTES_PER_S) as connection:
            driver = attach(model, settings, folder)
            pages = Pages(blocks)
            serving, bare = Serving(model, driver, pages), Serving(model, None, pages)
            for turn in range(TURNS):
                for number, prompts in enumerate(conversations):
                    tokens = prompts[turn]
                    bare.first_token(
                        tokens[::-1]
                    )  # kernels of this length are chosen and loaded before either is timed
                    if number % 2:
                        computed, _ = bare.first_token(tokens)
                        served, loaded = serving.first_token(tokens)
                    else:
                        served, loaded = serving.first_token(tokens)
                        computed, _ = bare.first_token(tokens)
                    times["computed"].append(computed)
                    times["s3kv"].append(served)
                    rows.append(
                        {
                            "turn": turn,
                            "tokens": len(tokens),
                            "loaded": loaded,
                            "computed_s": computed,
                            "s3kv_s": served,
                        }
                    )
            totals = status(connection)["totals"]
            driver.shutdown()
    later = [row for row in rows if row["turn"]]
    result = {
        "conversations": CONVERSATIONS, "turns": TURNS, "tier_bytes": TIER_BYTES,
        "needed_bytes": sum(len(c[-1]) for c in conversations) // shape.block * shape.block_bytes,
        "latency_s": LATENCY_S, "bytes_per_s": BYTES_PER_S,
        "loaded_fraction_of_later_turns": sum(r["loaded"] for r in later) / sum(r["tokens"] for r in later),
        "median_computed_s": statistics.median(r["computed_s"] for r in later),
        "median_s3kv_s": statistics.median(r["s3kv_s"] for r in later),
        "fetched_blocks": totals["fetched_blocks"], "rows": rows,
    }  # fmt: skip
    print({key: value for key, value in result.items() if key != "rows"}, flush=True)
    return result
