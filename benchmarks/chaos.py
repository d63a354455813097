"""`python -m benchmarks.chaos --seeds 0-499`: seeded chaos over real processes; totals and failing seeds as JSON.

One seed is one run (`chaos_plan`, `chaos_run`). `--share-s3 0.25`: that share of the seeds runs against SeaweedFS
behind the faulty proxy, the others against a folder, with faults drawn in the agents. `--keep` leaves a failing run's
folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from support.faulty_proxy import faulty_proxy
from support.servers import S3Place, running_seaweedfs

from benchmarks import ROOT
from benchmarks.chaos_member import Outcome
from benchmarks.chaos_plan import StoreKind, make_plan
from benchmarks.chaos_run import ChaosRun

SCRATCH = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
BUCKET = "chaos"


def store_of(seed: int, share_s3: float) -> StoreKind:
    """Which store a seed runs against: the same for the same share."""
    return "s3" if (seed * 0.61803398875) % 1.0 < share_s3 else "file"


@contextmanager
def scratch(seed: int, *, keep: bool = False) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"s3kv-chaos-{seed}-", dir=SCRATCH))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def run_seed(seed: int, folder: Path, place: S3Place | None = None, *, fair: bool = False) -> Outcome:
    """One run; with a `place` against that server behind a proxy of its own. `fair`: without any fault."""
    plan = make_plan(seed, "file" if place is None else "s3")
    plan = plan.without_faults() if fair else plan
    if place is None:
        return ChaosRun(plan, folder, {"url": f"file://{folder}/store"}).run()
    place = place.fresh()
    with faulty_proxy(place.endpoint) as proxy:
        return ChaosRun(plan, folder, place.values(path_style=True), proxy).run()


def totals(outcomes: list[Outcome]) -> dict[str, Any]:
    faults, kills, notes, stores = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for outcome in outcomes:
        faults.update(outcome.faults)
        kills.update(outcome.kills)
        stores[outcome.store] += 1
        for name, value in outcome.notes.items():
            notes[name] = max(notes[name], value) if name.endswith("most") else notes[name] + value
    return {
        "runs": len(outcomes),
        "stores": dict(stores),
        "requests": sum(outcome.requests for outcome in outcomes),
        "wrong_tokens": sum(outcome.wrong_tokens for outcome in outcomes),
        "failed_seeds": {outcome.seed: outcome.problems for outcome in outcomes if outcome.problems},
        "kills": dict(sorted(kills.items())),
        "faults": dict(sorted(faults.items())),
        "notes": dict(sorted(notes.items())),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
    }


def joined(files: list[Path]) -> dict[str, Any]:
    """Totals of runs noted by `--out`; of a seed that ran again the last one counts, and the seed is named."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    last: dict[int, dict[str, Any]] = {}
    again = sorted(
        {line["seed"] for at, line in enumerate(lines) if any(o["seed"] == line["seed"] for o in lines[:at])}
    )
    commits = Counter[str]()
    for line in lines:
        last[line["seed"]] = line
    for line in last.values():
        commits[line.pop("commit")] += 1
    counted = ("faults", "kills", "notes")
    outcomes = [Outcome(**line | {name: Counter(line[name]) for name in counted}) for line in last.values()]
    seeds = {"first_seed": min(last), "last_seed": max(last), "seeds_run_again": again}
    return {"commits": dict(commits)} | seeds | totals(outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-9", help="a number, or FIRST-LAST")
    parser.add_argument("--share-s3", type=float, default=0.25)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--out", type=Path, help="append one JSON line a run here")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--fair", action="store_true", help="the same workloads without faults")
    parser.add_argument("--commit", default=commit(), help="noted with each run")
    parser.add_argument("--join", type=Path, nargs="+", help="instead of running: the totals of such files")
    arguments = parser.parse_args()
    if arguments.join:
        print(json.dumps(joined(arguments.join), indent=2))
        return 0
    first, _, last = arguments.seeds.partition("-")
    began = time.monotonic()
    outcomes = []
    with ExitStack() as stack:
        place: S3Place | None = None
        for seed in range(int(first), int(last or first) + 1):
            if time.monotonic() - began > arguments.budget_s:
                break
            on_s3 = store_of(seed, arguments.share_s3) == "s3"
            if on_s3 and place is None:
                data = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=SCRATCH)))
                place = S3Place(stack.enter_context(running_seaweedfs(data)), BUCKET)
                place.client().create_bucket(Bucket=BUCKET)
            outcomes.append(_one(seed, place if on_s3 else None, arguments))
    print(json.dumps(totals(outcomes), indent=2))
    return 1 if any(outcome.problems for outcome in outcomes) else 0


def _one(seed: int, place: S3Place | None, arguments: argparse.Namespace) -> Outcome:
    keep, out = arguments.keep, arguments.out
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix=f"s3kv-chaos-{seed}-", dir=SCRATCH))
        outcome = run_seed(seed, folder, place, fair=arguments.fair)
        if not (keep and outcome.problems):
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
    kept = f" (kept in {folder})" if keep and outcome.problems else ""
    text = "; ".join(outcome.problems) or "well"
    print(
        f"seed {seed} {outcome.store}: {outcome.requests} requests, {outcome.seconds:.1f} s: {text[:400]}{kept}",
        flush=True,
    )
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(vars(outcome) | {"commit": arguments.commit}) + "\n")
    return outcome


def commit() -> str:
    shown = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return shown.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
