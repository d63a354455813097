"""A hit in host memory: match and copy 1 GiB out of the agent's slots to pages, against one memcpy of 1 GiB."""

from __future__ import annotations

import ctypes
import random
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.agent_process import Clients, agent_process, chain, one_page_spec
from benchmarks.harness import GIB, MIB, Options, Report, at_least, race
from s3kv.connector.device import HostDevice
from s3kv.connector.strips import Copies, Strip, numbers

SIZES = (2 * MIB, 256 << 10)


def measure(options: Options) -> Report:
    total = GIB // 4 if options.quick else GIB
    report = Report(
        f"host hit: match and copy out {total // MIB} MiB, in as many threads as there are cores, 4 at most"
    )
    for size in SIZES:
        _measure(report, size, total, options.rounds(12))
    report.note(
        "Every memcpy is one thread's. That of 1 GiB at once writes past the caches (glibc's non-temporal stores), as "
        "one of a page's size does not; pages lie at random places on both sides, so nothing larger can be copied."
    )
    return report


def _measure(report: Report, size: int, total: int, rounds: int) -> None:
    blocks = total // size
    sections = {"tier": {"capacity_bytes": total + 64 * size}, "upload": {"enabled": False}, "load": _ALL}
    with (
        tempfile.TemporaryDirectory(prefix="s3kv-bench-") as folder,
        agent_process(Path(folder), **sections) as (settings, _),
    ):
        clients = Clients.start(settings, one_page_spec(size))
        hashes = chain(clients.spec, 1, blocks)
        clients.save(hashes, random.Random(1).randbytes(size))
        arena = clients.arena
        source = Strip.of(torch.frombuffer(arena.buffer, dtype=torch.uint8).view(arena.slots, size))
        pool = torch.zeros((blocks, size), dtype=torch.uint8)
        pages = numbers(random.Random(2).sample(range(blocks), blocks))
        target, device = Strip.of(pool), HostDevice()
        plain = torch.ones(total, dtype=torch.uint8)

        def hit() -> None:
            offer = clients.leader.match(hashes)
            assert len(offer.slots) == blocks
            device.copy([Copies(target, pages, source, numbers(offer.slots))], None)
            clients.worker.release(offer.lease, offer.epoch)

        def by_page() -> None:
            for at in range(0, total, size):
                ctypes.memmove(pool.data_ptr() + at, source.base + at, size)

        series = race(
            {
                "hit": hit,
                "memcpy": lambda: ctypes.memmove(pool.data_ptr(), source.base, total),
                "by page": by_page,
                "private": lambda: ctypes.memmove(pool.data_ptr(), plain.data_ptr(), total),
            },
            rounds,
        )
        hit()
        assert np.array_equal(pool[0].numpy(), pool[-1].numpy())
        name, ours = f"{size >> 10} KiB pages", series["hit"]
        report.rates(name, ours, "memcpy of the slots, at once", series["memcpy"], total, goal=at_least(0.9))
        report.rates(name, ours, "memcpy page by page", series["by page"], total, goal=at_least(0.9))
        report.rates(name, ours, "memcpy of private memory", series["private"], total)
        clients.close()


_ALL = {"max_pinned_fraction": 1.0}
