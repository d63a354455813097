"""What a client may lie about, and what the machine may refuse, without harm to anybody else."""

from __future__ import annotations

import math
import socket
import struct
import threading
from pathlib import Path

import pytest
from support.agents import FakeEngine, RunningAgent, agent_settings, running_agent, small_spec
from support.virtual_agent import VirtualAgent, in_virtual_time

from s3kv.agent.engines import MAX_RANKS, Engines
from s3kv.client import protocol as p
from s3kv.client import trust
from s3kv.client.connection import Connection
from s3kv.client.engine import MAX_EPOCHS, WorkerClient
from s3kv.errors import ConfigError
from s3kv.identity import NamespaceSpec
from s3kv.settings import Settings
from s3kv.store.memory import MemoryStore
from s3kv.store.threads import StartedThreads


def sent_by_a_worker(settings: Settings, *messages: bytes) -> bytes:
    """What comes back until the agent closes the connection, or nothing more comes."""
    answers = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        client.connect(str(settings.agent.socket))
        client.sendall(p.encode(p.Hello(1, p.PROTOCOL, "worker")) + b"".join(messages))
        while piece := client.recv(65536):
            answers += piece
    return answers


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, 1e9])
def test_numbers_that_would_upset_the_timers_end_the_connection(tmp_path: Path, number: float) -> None:
    settings, spec = agent_settings(tmp_path), small_spec()
    with running_agent(settings):
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 2))
        attach = p.encode(p.Attach(2, spec.to_json(), "liar", 0, 1, (0,), (0,)))
        for message in (
            p.Match(3, 1, bytes(16), 0, number, number),
            p.Drain(3, number),
            p.Prefetch(3, spec.name, bytes(16), number),
        ):
            assert sent_by_a_worker(settings, attach, p.encode(message))
        assert engine.load(engine.chain(1, 2)) == 2
        engine.close()


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1 << 60), (0, MAX_RANKS + 1), (-1, 2), (2, 2), (5, 0)])
def test_an_engine_of_absurd_size_is_refused(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        Engines().join("engine", ranks, 1, rank=rank, leader=False)


def test_a_rank_that_came_back_is_attached_although_its_old_connection_ends_later() -> None:
    engines = Engines()
    engine = engines.join("engine", 1, 100, rank=0, leader=False)
    engines.join("engine", 1, 100, rank=0, leader=False)
    engine.mapped[0] += 1
    engines.leave("engine", 100, rank=0, leader=False)
    assert engine.trouble() == ""
    engines.leave("engine", 100, rank=0, leader=False)
    assert len(engines) == 0


def test_lengths_of_hashes_slots_and_tickets_are_checked(tmp_path: Path) -> None:
    settings, spec = agent_settings(tmp_path), small_spec()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 2))
        attach = p.encode(p.Attach(2, spec.to_json(), "liar", 0, 1, (0,), (0,)))
        too_many = b"\0" * (p.HASH_BYTES * (p.MAX_BLOCKS + 1))
        for message in (
            p.Reserve(3, 1, 0, bytes(15), 0, bytes(16)),
            p.Reserve(3, 1, 0, bytes(16), 0, bytes(17)),
            p.Reserve(3, 1, 0, bytes(16), 0, too_many),
            p.Commit(1, 0, b"abc", b"abcd"),
            p.Finished(1, b"short"),
            p.Match(3, 1, too_many, 0, 0.0, 0.0),
        ):
            sent_by_a_worker(settings, attach, p.encode(message))
        agent.call(agent.namespace(spec).directory.check)
        assert engine.load(engine.chain(1, 2)) == 2
        engine.close()


def test_a_frame_longer_than_the_limit_costs_no_memory(tmp_path: Path) -> None:
    settings = agent_settings(tmp_path)
    with running_agent(settings), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        client.connect(str(settings.agent.socket))
        client.sendall(struct.pack("<I", p.MAX_FRAME_BYTES + 1))
        assert client.recv(1) == b""


def test_processes_that_cannot_be_told_apart_by_number_are_still_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across PID namespaces the kernel reports 0 for every process: one that exits must not free another's slots."""
    monkeypatch.setattr("s3kv.agent.server.peer_of", lambda sock: trust.Peer(0, trust.peer_of(sock).uid))
    settings, spec = agent_settings(tmp_path), small_spec()
    with running_agent(settings) as agent:
        engines = [FakeEngine.start(settings, spec, name=name) for name in "ab"]
        engines[0].save(engines[0].chain(1, 3))
        offer = engines[0].match(engines[0].chain(1, 3))
        holders = agent.call(lambda: set(agent.agent.node._connections))  # type: ignore[union-attr]
        assert len(holders) == 4
        other = agent.call(lambda: agent.namespace(spec).engines._by_name["b"].readers()[0])
        agent.call(lambda: agent.agent.node.exited(other))  # type: ignore[union-attr]
        assert agent.call(lambda: agent.namespace(spec).directory.counters().pinned) == 3
        engines[0].check(engines[0].chain(1, 3), offer)
        for engine in engines:
            engine.close()


def test_a_process_number_that_was_given_away_again_belongs_to_the_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old holder's exit is dealt with before the new one is let in, however late the loop comes to it."""
    import os
    import subprocess
    import sys

    gone = subprocess.Popen([sys.executable, "-c", ""])
    pidfd = os.pidfd_open(gone.pid)
    gone.wait()
    settings = agent_settings(tmp_path)
    with running_agent(settings) as agent:
        exited: list[object] = []
        node = agent.agent.node  # type: ignore[union-attr]
        monkeypatch.setattr(node, "exited", exited.append)
        server = agent.call(lambda: _server_of(agent))
        server._watched[os.getpid()] = pidfd
        monkeypatch.setattr(agent._loop, "remove_reader", lambda fd: True)
        Connection.open(settings.agent.socket, "worker", timeout_s=5).close()
        assert exited == [os.getpid()]
        assert server._watched[os.getpid()] != pidfd or len(exited) == 1


def _server_of(agent: object) -> object:
    import gc

    from s3kv.agent.server import Server

    return next(each for each in gc.get_objects() if isinstance(each, Server) and each._node is agent.agent.node)  # type: ignore[attr-defined]


def test_arenas_of_agents_long_gone_are_unmapped(tmp_path: Path) -> None:
    """An agent that dies again and again must not fill the engine's memory."""
    settings, spec = agent_settings(tmp_path, agent={"reconnect_s": 0.001}), small_spec()
    worker: WorkerClient | None = None
    mapped: list[object] = []
    for number in range(MAX_EPOCHS + 4):
        with running_agent(settings, seed=number):
            if worker is None:
                worker = WorkerClient(
                    settings, spec, rank=0, ranks=1, engine_id="e",
                    on_arena=lambda arena, may_pin: mapped.append(arena), on_arena_gone=mapped.remove,
                )  # fmt: skip
            assert worker.connect()
    assert worker is not None
    assert len(mapped) == len(worker._arenas) == MAX_EPOCHS
    worker.close()
    assert mapped == []


def test_no_memory_for_a_second_part_leaves_nothing_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3kv.tier.arena import Arena

    made: list[Arena] = []
    real = Arena.create

    def create(slots: int, slot_bytes: int, hugepages: bool = False, *, check: bool = True) -> Arena:
        if made:
            raise ConfigError("tier.capacity_bytes: no more")
        made.append(real(slots, slot_bytes, hugepages, check=check))
        return made[0]

    monkeypatch.setattr("s3kv.agent.namespace.Arena.create", create)
    settings, spec = agent_settings(tmp_path), small_spec(shards=2)
    with running_agent(settings):
        worker = WorkerClient(settings, spec, rank=0, ranks=2, engine_id="e")
        assert not worker.connect()
        assert made[0].closed
        worker.close()


@pytest.mark.parametrize("store", ["memory", "folder"])
def test_a_machine_without_further_threads_changes_nothing_for_a_running_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """A pool that starts threads on demand runs a refused job later, into memory that is somebody else's by then."""
    settings, spec = agent_settings(tmp_path), small_spec()
    with running_agent(settings, MemoryStore() if store == "memory" else None) as agent:
        engine = FakeEngine.start(settings, spec)
        wait_for_catalog(agent, spec)

        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for number in range(8):
                engine.save(engine.chain(number, 5))
            assert agent.drain()[1] == 0
            agent.forget()
            for number in range(8):
                assert engine.load(engine.chain(number, 5)) == 5
        engine.close()


def wait_for_catalog(agent: RunningAgent, spec: NamespaceSpec) -> None:
    agent.call(agent.namespace(spec).catalog_open.wait)


def test_threads_that_cannot_be_started_are_an_error_of_the_settings_and_run_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = threading.Thread.start
    left = [2]

    def some(self: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        started(self)

    monkeypatch.setattr(threading.Thread, "start", some)
    with pytest.raises(ConfigError, match=r"upload\.threads: 4 threads"):
        StartedThreads(4, "too-many", "upload.threads")
    monkeypatch.undo()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("too-many")]
    for thread in ours:
        thread.join(20)
    assert not any(thread.is_alive() for thread in ours)


def test_a_full_disk_under_the_index_leaves_host_memory_serving_and_is_counted(tmp_path: Path) -> None:
    """The catalog's index takes no more; what it holds is found, the rest are misses, nothing is lost in the bucket."""

    async def work(agent: VirtualAgent) -> None:
        import asyncio

        await agent.opened()
        chains = [agent.chain(number, 8) for number in range(150)]
        for chain in chains:
            agent.save(chain)
            await agent.quiet()
            assert await agent.load(chain, wait_s=0.0) == 8
        await asyncio.sleep(5.0)
        stats = agent.namespace.catalog.stats()
        assert stats["index_unwritable"] > 0
        assert agent.total("uploaded_chunks") == len(chains), "storing goes on without an index"
        agent.forget()
        found = [await agent.load(chain) for chain in chains]
        assert 0 < sum(found) < 8 * len(chains)
        await agent.quiet()
        agent.check_at_rest()

    in_virtual_time(tmp_path, work, catalog={"map_bytes": 1 << 17})


STARVED = """
import asyncio, os, resource
from s3kv.errors import StoreError
from s3kv.settings import StoreSettings
from s3kv.store.opening import open_store

async def main():
    store = open_store(StoreSettings(url="s3://bucket/p", endpoint="http://127.0.0.1:1", region="us-east-1",
        access_key_id="key", secret_access_key="secret", retries=0, breaker_failures=100))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    for limit in (lowest, soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            await store.head("k")
        except StoreError as error:
            print(type(error).__name__)

asyncio.run(main())
"""


def test_a_moment_without_descriptors_at_the_first_request_does_not_break_the_s3_client_for_good() -> None:
    """Found by chaos seed 256: its runtime, started then, is poisoned, and every later call panics."""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2 and "panicked" not in done.stderr
