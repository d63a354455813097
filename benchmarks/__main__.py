"""`python -m benchmarks [NAME…] [--quick] [--list]`: each benchmark in a process of its own, one after another."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time

from benchmarks import ROOT
from benchmarks.harness import Options, run

NAMES = (
    "chain",
    "directory",
    "match",
    "catalog",
    "codec",
    "engine",
    "torch_save",
    "one_block",
    "store",
    "agent",
    "host",
    "snapshot",
    "gc",
    "growth",
    "lmcache",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all without one")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: does it still work?")
    parser.add_argument("--list", action="store_true", help="what there is")
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"there is no benchmark {min(unknown)}")
    names = args.names or NAMES
    if args.list:
        for name in names:
            print(f"{name:12} {(_module(name).__doc__ or '').splitlines()[0]}")
        return 0
    if len(names) == 1:
        run(names[0], _module(names[0]).measure, Options(args.quick))
        return 0
    return _run_each(names, args.quick)


def _module(name: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"benchmarks.bench_{name}")


def _run_each(names: tuple[str, ...] | list[str], quick: bool) -> int:
    """Memory of one is not memory of the next, and one that fails does not stop the others."""
    began, failed = time.perf_counter(), []
    for name in names:
        command = [sys.executable, "-m", "benchmarks", name, *(["--quick"] if quick else [])]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    if not quick:
        subprocess.run([sys.executable, "-m", "benchmarks.plots"], cwd=ROOT, check=False)
    print(f"{len(names)} benchmarks in {time.perf_counter() - began:.0f} s", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
