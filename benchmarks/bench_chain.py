"""Block hashes of a 128k-token prompt, against one blake2b over the same bytes.

A hash at the end of each block costs a compression of its own: with blocks of 32 tokens (128 bytes, one compression)
the work alone is twice that of the peer. The rest is Python's, two calls a block, and making u32 of a list of ints.
"""

from __future__ import annotations

import hashlib
import random
from array import array

from benchmarks.harness import Options, Report, at_most, race
from s3kv.identity import Chain

TOKENS = 1 << 17
VOCABULARY = 128_256


def measure(options: Options) -> Report:
    report = Report(f"hash chain of a prompt of {TOKENS:,} tokens")
    rng = random.Random(8)
    tokens = [rng.randrange(VOCABULARY) for _ in range(TOKENS)]
    raw = array("I", tokens).tobytes()
    key = hashlib.blake2b(b"namespace", digest_size=32).digest()

    def chain(tokens_per_block: int) -> None:
        made = Chain(key, tokens_per_block)
        made.extend(tokens)
        assert len(made.hashes) == TOKENS // tokens_per_block

    series = race(
        {
            "blake2b": lambda: hashlib.blake2b(raw, digest_size=16, key=key).digest(),
            "u32": lambda: array("I", tokens),
            "32": lambda: chain(32),
            "64": lambda: chain(64),
            "128": lambda: chain(128),
        },
        options.rounds(60),
    )
    for block in ("32", "64", "128"):
        goal = at_most(3) if block == "32" else None
        report.times(
            f"Chain.extend, {block} tokens a block", series[block], "blake2b, same bytes", series["blake2b"],
            clock="cpu", goal=goal,
        )  # fmt: skip
    report.times("of it: list of ints to u32", series["u32"], "blake2b, same bytes", series["blake2b"], clock="cpu")
    best = {name: min(each.cpu) * 1e3 for name, each in series.items()}
    report.note("best of all rounds, ms CPU: " + ", ".join(f"{name} {value:.2f}" for name, value in best.items()))
    return report
