"""What a match of the directory costs, against bare dict look-ups of the same hashes in the same run."""

from __future__ import annotations

import hashlib
import random

from benchmarks.harness import Options, Report, race
from s3kv.identity import ROOT
from s3kv.tier import Directory

BLOCKS, CHAINS = 1024, 64


def fresh(hashes: list[bytes]) -> list[bytes]:
    """Equal, but new objects, as the socket delivers them: their hash value is not cached."""
    return [bytes(bytearray(each)) for each in hashes]


def resident_chain(directory: Directory, blocks: int, name: int) -> list[bytes]:
    hashes = [hashlib.blake2b(b"%d/%d" % (name, i), digest_size=16).digest() for i in range(blocks)]
    for slot in directory.begin_fetch(hashes, parent=ROOT, start_block=0):
        assert slot is not None
        directory.finish_fetch(slot, ok=True)
    return hashes


def measure(options: Options) -> Report:
    slots = BLOCKS * CHAINS
    report = Report(f"directory: match of {BLOCKS:,} blocks, {slots:,} being resident")
    directory = Directory(slots, (0, 1, 255), slot_bytes_all_parts=4096, dirty_max_slots=0)
    chains = [resident_chain(directory, BLOCKS, name) for name in range(CHAINS)]
    bare = {each: i for i, each in enumerate(each for hashes in chains for each in hashes)}
    rng, keys, leases = random.Random(7), fresh(chains[0]), []

    def draw(name: str) -> None:
        keys[:] = fresh(rng.choice(chains))
        while len(leases) > (name == "release"):
            directory.release(leases.pop())
        if name == "release" and not leases:
            leases.append(directory.match(keys, readers={0: "a", 1: "b"}).lease_id)

    def look_up() -> None:
        get = bare.get
        found = [get(key) for key in keys]
        assert None not in found

    def match() -> None:
        found = directory.match(keys, readers={0: "a", 1: "b"})
        leases.append(found.lease_id)
        assert len(found.slots) == BLOCKS

    def release() -> None:
        directory.release(leases.pop())

    series = race({"dict": look_up, "match": match, "release": release}, options.rounds(400), before=draw)
    directory.check()
    report.times("match", series["match"], "dict.get of each", series["dict"], unit="µs")
    report.times("release of its lease", series["release"], "dict.get of each", series["dict"], unit="µs")
    return report
