"""An agent as a process of its own, as it runs in production, for benchmarks; and an engine's clients of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.agents import agent_settings
from support.servers import die_with_parent

from s3kv.client.connection import Connection
from s3kv.client.engine import LeaderClient, WorkerClient
from s3kv.client.protocol import Drain, Drained, Forget, Report, Status
from s3kv.errors import AgentUnavailable
from s3kv.identity import ROOT, GroupSpec, NamespaceSpec, RegionSpec, chain_hashes
from s3kv.settings import CONFIG_VARIABLE, Settings
from s3kv.sim.demo import write_settings
from s3kv.tier.arena import Arena

START_S = 30.0


def one_page_spec(page_bytes: int, *, tokens_per_block: int = 32, name: str = "benchmark") -> NamespaceSpec:
    """One layer group, one shard: a block is one page."""
    group = GroupSpec((0,), None, (RegionSpec(page_bytes),))
    return NamespaceSpec(name, "weights", "bfloat16", tokens_per_block, (group,))


def chain(spec: NamespaceSpec, seed: int, blocks: int) -> list[bytes]:
    tokens = range(seed << 20, (seed << 20) + blocks * spec.tokens_per_block)
    return chain_hashes(spec.digest, spec.tokens_per_block, tokens)


@contextmanager
def agent_process(folder: Path, **sections: dict[str, Any]) -> Iterator[tuple[Settings, subprocess.Popen[bytes]]]:
    """`python -m s3kv.agent` with the tests' quick settings and `sections` over them, ended afterwards."""
    settings = agent_settings(folder, **sections)
    config = folder / "s3kv.yaml"
    write_settings(settings, config)
    with (folder / "agent.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "s3kv.agent"],
            env={**os.environ, CONFIG_VARIABLE: str(config)},
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
        )
    try:
        _wait(settings, process, folder / "agent.log")
        yield settings, process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(settings: Settings, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            Connection.open(settings.agent.socket, "cli", timeout_s=1.0).close()
            return
        except AgentUnavailable:
            time.sleep(0.05)
    raise RuntimeError(f"the agent did not start:\n{log.read_text()[-2000:]}")


@dataclass
class Clients:
    """An engine of one rank without a model."""

    spec: NamespaceSpec
    leader: LeaderClient
    worker: WorkerClient
    control: Connection

    @classmethod
    def start(cls, settings: Settings, spec: NamespaceSpec) -> Clients:
        leader = LeaderClient(settings, spec, ranks=1, engine_id="benchmark")
        worker = WorkerClient(settings, spec, rank=0, ranks=1, engine_id="benchmark")
        if not (leader.connect() and worker.connect()):
            raise RuntimeError(f"the agent is not there: {leader.stats} {worker.stats}")
        return cls(spec, leader, worker, Connection.open(settings.agent.socket, "cli", timeout_s=10))

    @property
    def arena(self) -> Arena:
        found = self.worker.arena(self.worker.epoch, self.spec.parts[0].shard)
        assert found is not None
        return found

    def save(self, hashes: Sequence[bytes], page: Any = None) -> None:
        """Commits every block; `page` (bytes-like) is what each holds, None leaves what lies in the slot."""
        part = self.spec.parts[0].shard
        arena = self.arena
        for at in range(0, len(hashes), 1024):
            piece = hashes[at : at + 1024]
            held = self.worker.reserve(part, hashes[at - 1] if at else ROOT, at, piece)
            assert all(slot >= 0 for slot in held.slots), "the tier has no room for what the benchmark saves"
            if page is not None:
                for slot in held.slots:
                    arena.view(slot)[: len(page)] = page
            self.worker.commit(part, held, range(len(piece)))
        self.settle()

    def settle(self) -> None:
        """Returns once the agent has read what the worker told it."""
        connection = self.worker._connection
        assert connection is not None
        connection.call(Status(connection.next_id()), Report, timeout_s=60)

    def drain(self, deadline_s: float = 120.0) -> Drained:
        return self.control.call(Drain(self.control.next_id(), deadline_s), Drained, timeout_s=deadline_s + 10)

    def forget(self) -> None:
        from s3kv.client.protocol import Done

        self.control.call(Forget(self.control.next_id(), ""), Done, timeout_s=60)

    def close(self) -> None:
        self.leader.close()
        self.worker.close()
        self.control.close()
