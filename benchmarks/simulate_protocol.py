"""Runs schedules of the simulated protocol and prints what happened in them.

A seed that fails is printed; `--first SEED --schedules 1` repeats it.

    python benchmarks/simulate_protocol.py --schedules 100000
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.protocol_sim import simulate


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--schedules", type=int, default=1000)
    chosen = options.parse_args()
    counts: Counter[str] = Counter()
    failed: list[int] = []
    gc.set_threshold(50_000)  # every schedule leaves cycles; looking for them less often saves a tenth
    began = time.monotonic()
    for seed in range(chosen.first, chosen.first + chosen.schedules):
        try:
            counts += simulate(seed)
        except AssertionError as error:
            failed.append(seed)
            print(f"seed {seed}: {error}", flush=True)
        if (seed + 1 - chosen.first) % 5000 == 0:
            done = seed + 1 - chosen.first
            print(f"{done} schedules, {len(failed)} failed, {time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps({"failed seeds": failed, **dict(sorted(counts.items()))}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
