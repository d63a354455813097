"""Fuzzing of every reader of stored bytes, with atheris (`pip install s3kv-cache[fuzz]`) or without.

python tests/format/fuzz_formats.py TARGET [libFuzzer options, corpus folders]   coverage-guided, one target
python tests/format/fuzz_formats.py --seeded RUNS [SEED]                        every target, mutated valid inputs
python tests/format/fuzz_formats.py --corpus FOLDER                          writes valid inputs, a folder a target

A target fails by any exception but the ones that it expects. Limits on memory are libFuzzer's: `-rss_limit_mb`,
`-malloc_limit_mb`; runs that count are logged in `benchmarks/results/`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]


def run_seeded(runs: int, seed: int) -> int:
    """Runs every target `runs` times; returns the executions."""
    from support.format_targets import TARGETS, mutated, seeds

    rng = random.Random(seed)
    for name, target in TARGETS.items():
        valid = seeds(name)
        for _ in range(runs):
            target(mutated(rng.choice(valid), rng))
    return runs * len(TARGETS)


def write_corpus(folder: Path) -> None:
    from support.format_targets import TARGETS, seeds

    for name in TARGETS:
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds(name)):
            (place / f"valid-{number}").write_bytes(seed)


def run_atheris(name: str, options: list[str]) -> None:
    """Does not return: libFuzzer exits the process."""
    import atheris

    with atheris.instrument_imports(include=["s3kv.format"]):
        from support.format_targets import TARGETS

    atheris.Setup([sys.argv[0], *options], TARGETS[name])
    atheris.Fuzz()


def main(arguments: list[str]) -> None:
    match arguments:
        case ["--seeded", runs, *seed]:
            print(f"{run_seeded(int(runs), int(seed[0]) if seed else 0)} executions, no failure")
        case ["--corpus", folder]:
            write_corpus(Path(folder))
        case [name, *options] if not name.startswith("-"):
            run_atheris(name, options)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
