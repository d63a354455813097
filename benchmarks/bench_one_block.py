"""Bytes that leave the origin for one block out of a chunk of 16, against the block's own size, by nginx's own log."""

from __future__ import annotations

import os
import time

from benchmarks.agent_process import one_page_spec
from benchmarks.harness import MIB, Options, Report, at_most
from benchmarks.origins import Origin, nginx
from benchmarks.tier_node import tier_node

CHUNK_BLOCKS = 16
SIZES = (4 * MIB, 2 * MIB, 512 << 10, 128 << 10)
INDICES = (0, 5, 15)


def measure(options: Options) -> Report:
    report = Report("one block out of a chunk of 16, codec raw: bytes read")
    with nginx() as (origin, _):
        for size in SIZES:
            for index in INDICES:
                read, requests = _read(origin, size, index)
                report.row(
                    f"block {index} of {size >> 10} KiB, {requests} requests", read / 1e6, "MB", peer="the block",
                    peer_figure=size / 1e6, ratio=read / size, goal=at_most(1.1),
                )  # fmt: skip
    report.note("A chunk's header and a block lie apart. They are asked for at once, and by one request within 64 KiB.")
    return report


def _read(origin: Origin, size: int, index: int) -> tuple[int, int]:
    sections = {"upload": {"codec": "raw", "chunk_target_bytes": CHUNK_BLOCKS * size}}
    with tier_node(origin, one_page_spec(size, name=f"one block {size} {index}"), 64, **sections) as node:
        node.fill(os.urandom(size))
        hashes = node.fresh_chain(CHUNK_BLOCKS)
        node.do(node.save(node.reserve(hashes)))
        directory = node.namespace.directory
        directory.drop([hashes[index]])
        before = _settled(origin)
        node.do(node.load(hashes))
        after = _settled(origin)
        new = after[len(before) :]
        return sum(new), len(new)


def _settled(origin: Origin) -> list[int]:
    """nginx writes its log line after the answer has gone."""
    time.sleep(0.2)
    return origin.gets()
