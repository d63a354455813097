"""Runs schedules of the simulated protocol and keeps what happened in them.

    python benchmarks/simulate_protocol.py --schedules 100000 --processes 2 --out benchmarks/results/protocol.json

A seed that fails is printed; `--first SEED --schedules 1` repeats it. Totals are written after every portion, so a run
that is stopped has said how far it came.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PORTION = 500
TESTS = Path(__file__).resolve().parent.parent / "tests"


def run_portion(first: int, count: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """What happened in these schedules, and the seeds that failed, each with the reason."""
    sys.path.insert(0, str(TESTS))
    from support.protocol_sim import simulate

    gc.set_threshold(50_000)  # every schedule leaves cycles; looking for them less often saves a tenth
    counts: Counter[str] = Counter()
    failed = []
    for seed in range(first, first + count):
        try:
            counts += simulate(seed)
        except Exception as error:
            failed.append((seed, f"{type(error).__name__}: {error}"))
    return counts, failed


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--schedules", type=int, default=1000)
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--nice", type=int, default=10)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    os.nice(chosen.nice)
    result = run(chosen.first, chosen.schedules, chosen.processes, chosen.out)
    print(json.dumps(result, indent=1))
    return 1 if result["failed"] else 0


def run(first: int, schedules: int, processes: int, out: Path | None) -> dict[str, Any]:
    began = time.monotonic()
    end = first + schedules
    portions = [(at, min(PORTION, end - at)) for at in range(first, end, PORTION)]
    counts: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    result: dict[str, Any] = {}
    with ProcessPoolExecutor(processes) as pool:
        for done in as_completed([pool.submit(run_portion, *portion) for portion in portions]):
            more, wrong = done.result()
            counts += more
            failed += wrong
            for seed, reason in wrong:
                print(f"seed {seed}: {reason}", flush=True)
            result = {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "first seed": first,
                "schedules asked for": schedules,
                "seconds": round(time.monotonic() - began),
                "failed": sorted(failed),
                "totals": dict(sorted(counts.items())),
            }
            if out is not None:
                out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    sys.exit(main())
