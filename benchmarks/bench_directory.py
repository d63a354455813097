"""What a match of the directory costs, against bare dict lookups of the same hashes in the same run.

    python benchmarks/bench_directory.py

Prints the median of many calls: one match of a chain of resident blocks, the release of its lease, and a list of
`dict.get` over the same number of freshly made keys, in microseconds, and the ratio.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import time

from s3kv.identity import ROOT
from s3kv.tier import Directory


def fresh(hashes: list[bytes]) -> list[bytes]:
    """Equal, but new objects, as the socket delivers them: their hash value is not cached."""
    return [bytes(bytearray(each)) for each in hashes]


def resident_chain(directory: Directory, blocks: int, name: int) -> list[bytes]:
    hashes = [hashlib.blake2b(b"%d/%d" % (name, i), digest_size=16).digest() for i in range(blocks)]
    for slot in directory.begin_fetch(hashes, parent=ROOT, start_block=0):
        assert slot is not None
        directory.finish_fetch(slot, ok=True)
    return hashes


def measure(directory: Directory, bare: dict[bytes, int], hashes: list[bytes], times: dict[str, list[float]]) -> None:
    """One call of each kind; the lease is given back."""
    keys, keys_again = fresh(hashes), fresh(hashes)
    get = bare.get
    started = time.perf_counter()
    [get(key) for key in keys]
    looked_up = time.perf_counter()
    found = directory.match(keys_again, readers={0: "a", 1: "b"})
    matched = time.perf_counter()
    assert len(found.slots) == len(hashes)
    directory.release(found.lease_id, 0)
    released_first = time.perf_counter()
    directory.release(found.lease_id, 1)
    times["dict.get"].append(looked_up - started)
    times["match"].append(matched - looked_up)
    times["release"].append(time.perf_counter() - released_first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1024, help="blocks of the chain that is matched")
    parser.add_argument("--chains", type=int, default=64, help="chains that are resident")
    parser.add_argument("--calls", type=int, default=400)
    args = parser.parse_args()

    slots = args.blocks * args.chains
    directory = Directory(slots, (0, 1, 255), slot_bytes_all_parts=4096, dirty_max_slots=0)
    chains = [resident_chain(directory, args.blocks, name) for name in range(args.chains)]
    bare = {each: i for i, each in enumerate(each for hashes in chains for each in hashes)}
    rng = random.Random(7)
    times: dict[str, list[float]] = {"dict.get": [], "match": [], "release": []}
    for _ in range(args.calls):
        measure(directory, bare, rng.choice(chains), times)
    directory.check()
    base = statistics.median(times["dict.get"])
    print(f"{args.blocks} blocks of {slots} resident; median of {args.calls} calls")
    for name, calls in times.items():
        median = statistics.median(calls)
        print(f"{name:10} {median * 1e6:8.0f} us  {median / base:5.2f} x dict.get")


if __name__ == "__main__":
    main()
