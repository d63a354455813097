"""`match` of 1,024 resident blocks through the socket of an agent process, over an empty round trip."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.agent_process import Clients, agent_process, chain, one_page_spec
from benchmarks.harness import Options, Report, at_most, race
from s3kv.client.protocol import Promised, PromiseState

BLOCKS, CHAINS, PAGE = 1024, 16, 4096


def measure(options: Options) -> Report:
    report = Report(f"match of {BLOCKS:,} blocks, {BLOCKS * CHAINS:,} being resident: round trip through the socket")
    sections = {"tier": {"capacity_bytes": 2 * BLOCKS * CHAINS * PAGE}, "upload": {"enabled": False}}
    with (
        tempfile.TemporaryDirectory(prefix="s3kv-bench-") as folder,
        agent_process(Path(folder), **sections) as (settings, _),
    ):
        clients = Clients.start(settings, one_page_spec(PAGE))
        chains = [chain(clients.spec, seed, BLOCKS) for seed in range(CHAINS)]
        for hashes in chains:
            clients.save(hashes)
        _measure(report, clients, chains, options.rounds(1200))
        clients.close()
    return report


def _measure(report: Report, clients: Clients, chains: list[list[bytes]], rounds: int) -> None:
    connection = clients.leader._connection
    assert connection is not None
    turn = 0

    def empty() -> None:
        connection.call(Promised(connection.next_id(), 1, 0), PromiseState, timeout_s=5)

    def match() -> None:
        nonlocal turn, offer
        turn += 1
        offer = clients.leader.match(chains[turn % CHAINS])
        assert len(offer.slots) == BLOCKS

    offer = clients.leader.match(chains[0])

    def give_back(name: str) -> None:
        if offer.lease:
            clients.worker.release(offer.lease, offer.epoch)
            clients.settle()

    give_back("")
    series = race({"match": match, "empty": empty}, rounds, before=give_back)
    matched, none = series["match"], series["empty"]
    over = statistics.median(a - b for a, b in zip(matched.wall, none.wall, strict=True))
    report.row("match over an empty round trip, median", over * 1e3, "ms", goal=at_most(1.5, "figure"))
    report.times("match, median", matched, "empty round trip", none)
    report.row(
        "match, p99", matched.percentile(0.99) * 1e3, "ms", peer="empty round trip, p99",
        peer_figure=none.percentile(0.99) * 1e3,
    )  # fmt: skip
    report.times("of it in the engine's process", matched, "empty round trip", none, clock="cpu")
