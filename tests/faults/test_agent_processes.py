"""Agents and engines as processes that are killed, stopped, raced, starved and restarted."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.agent_process import AgentProcess, agent_process
from support.agents import FakeEngine, agent_settings, running_agent, small_spec

from s3kv.client import protocol as p
from s3kv.client.connection import Connection
from s3kv.errors import AgentUnavailable
from s3kv.settings import Settings


def prompt(folder: Path, **sections: dict[str, object]) -> Settings:
    """Settings of an engine that gives up quickly and comes back quickly."""
    values: dict[str, dict[str, object]] = {
        "agent": {"call_timeout_s": 0.3, "reconnect_s": 0.01},
        "load": {"wait_cap_ms": 100.0},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    return agent_settings(folder, **values)


def loads(engine: FakeEngine, chain: list[bytes]) -> int:
    """As many as are offered at last; ranks attach again as the connector's helper thread would see to."""
    for worker in engine.workers:
        if not worker.epoch:
            worker.connect()
    return engine.load(chain)


STEPS = ("attached", "reserved", "committed", "offered", "finished")


def bring_to(step: str, engine: FakeEngine, chain: list[bytes]) -> None:
    if step == "reserved":
        engine.save(chain, commit=False)
    elif step != "attached":
        engine.save(chain)
    if step == "offered":
        assert len(engine.match(chain).slots) == len(chain)
    if step == "finished":
        engine.leader.finished(chain[-1])


@pytest.mark.parametrize("step", STEPS)
def test_an_agent_killed_at_any_step_is_a_miss_and_its_successor_serves(tmp_path: Path, step: str) -> None:
    settings, spec = prompt(tmp_path), small_spec(shards=2)
    with agent_process(settings) as first:
        engine = FakeEngine.start(settings, spec)
        chain, other = engine.chain(1, 4), engine.chain(2, 3)
        bring_to(step, engine, chain)
        worker = engine.workers[0]
        epoch = worker.epoch
        arena = worker.arena(epoch, 0)
        assert arena is not None
        before = bytes(arena.view(0))
        first.kill()
        assert engine.match(chain).slots == []
        assert engine.save(chain) == 0
        assert worker.arena(epoch, 0) is arena and bytes(arena.view(0)) == before, "an offer made before is kept"
    with agent_process(settings) as second:
        second.until(lambda: loads(engine, other) == 3 or not engine.save(other))
        assert worker.epoch not in (0, epoch)
        assert engine.workers[0].stats["connected"] == 2
        second.until(lambda: loads(engine, other) == 3)
        tier = second.tier()
        assert (tier["pinned"], tier["quarantined"]) == (0, 0)
        engine.close()


@pytest.mark.parametrize("step", STEPS)
def test_a_stopped_agent_costs_a_call_and_then_pauses_and_goes_on_where_it_was(tmp_path: Path, step: str) -> None:
    settings, spec = prompt(tmp_path), small_spec()
    with agent_process(settings) as agent:
        engine = FakeEngine.start(settings, spec)
        chain = engine.chain(1, 4)
        bring_to(step, engine, chain)
        agent.pause()
        assert engine.match(chain).slots == []
        assert engine.workers[0].reserve(0, bytes(16), 0, engine.chain(3, 2)).epoch == 0
        assert engine.match(chain).slots == []
        agent.go_on()
        wanted = engine.chain(7, 4) if step == "reserved" else chain
        agent.until(lambda: loads(engine, wanted) == 4 or not engine.save(wanted))
        agent.until(lambda: loads(engine, wanted) == 4)
        held = 4 if step == "offered" else 0
        agent.until(lambda: not (engine.match([bytes(16)]).slots or agent.tier()["pinned"] != held))
        assert engine.workers[0].stats["connected"] == 1, "the connection, and what it holds, is kept"
        engine.close()


STOPPED = """
import os, signal, sys
from pathlib import Path
from support.agents import FakeEngine, agent_settings, small_spec
engine = FakeEngine.start(agent_settings(Path(sys.argv[1])), small_spec(), name="other")
offer = engine.match(engine.chain(1, 3))
engine.save(engine.chain(5, 2), commit=False)
print(len(offer.slots), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_engine_keeps_its_slots_until_it_has_exited(tmp_path: Path) -> None:
    """Never by a clock: what it is copying from and into may not change under it."""
    settings, spec = agent_settings(tmp_path, tier={"capacity_bytes": 8 * 4096}), small_spec()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 3))
        holder = subprocess.Popen(
            [sys.executable, "-c", STOPPED, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""},
        )
        assert holder.stdout is not None and holder.stdout.readline().strip() == "3"
        for number in range(20):
            engine.save(engine.chain(10 + number, 3))
        counters = agent.call(lambda: agent.namespace(spec).directory.counters())
        assert (counters.pinned, counters.arriving) == (3, 2)
        holder.kill()
        holder.wait()
        holder.stdout.close()
        assert wait_for(agent, lambda: agent.namespace(spec).directory.counters().pinned == 0)
        assert engine.load(engine.chain(1, 3)) == 3
        engine.close()


def wait_for(agent: object, condition: object) -> bool:
    import asyncio

    async def turns() -> bool:
        for _ in range(4000):
            if condition():  # type: ignore[operator]
                return True
            await asyncio.sleep(0.002)
        return False

    return bool(agent.call(turns))  # type: ignore[attr-defined]


def test_of_agents_that_race_for_one_socket_one_serves_and_the_others_say_why(tmp_path: Path) -> None:
    settings = agent_settings(tmp_path)
    agents = [AgentProcess(settings, wait=False) for _ in range(4)]
    try:
        for _ in range(600):
            if sum(each.process.poll() is None for each in agents) == 1:
                break
            time.sleep(0.1)
        assert sorted((each.process.poll() for each in agents), key=str) == [1, 1, 1, None]
        assert agents[0].answers()
        assert agents[0].log.count("another agent is serving") == 3
        assert "Traceback" not in agents[0].log
    finally:
        for each in agents:
            each.kill()


@pytest.mark.parametrize("gone", ["socket", "socket and lock", "folder"])
def test_a_socket_that_vanishes_comes_back(tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary folders are tidied; an agent that nobody can reach any more would need a restart."""
    monkeypatch.setattr("s3kv.agent.service.SOCKET_CHECK_S", 0.02)
    settings, spec = agent_settings(tmp_path / "run", store={"url": f"file://{tmp_path}/store"}), small_spec()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 3))
        path = settings.agent.socket
        path.unlink()
        if gone != "socket":
            path.with_suffix(".lock").unlink()
        if gone == "folder":
            (tmp_path / "run").rename(tmp_path / "elsewhere")
        assert engine.load(engine.chain(1, 3)) == 3, "who is connected does not notice"
        assert wait_for(agent, path.exists)
        assert (path.stat().st_mode & 0o777) == 0o600
        late = FakeEngine.start(settings, spec, name="late")
        assert late.load(late.chain(1, 3)) == 3
        with pytest.raises(Exception, match="another agent is serving"):
            from support.agents import RunningAgent

            RunningAgent(settings)
        engine.close()
        late.close()


def test_an_agent_that_was_replaced_flushes_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3kv.agent.service.SOCKET_CHECK_S", 0.02)
    settings, spec = agent_settings(tmp_path, upload={"seal_age_s": 1000.0}), small_spec()
    with running_agent(settings) as first:
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 3))
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:  # else it may be back before the second one has begun
            held.set()
            assert go_on.wait(60)

        assert first._loop is not None
        first._loop.call_soon_threadsafe(hold)
        assert held.wait(60)
        settings.agent.socket.unlink()
        settings.agent.socket.with_suffix(".lock").unlink()
        with running_agent(settings, seed=1) as second:
            go_on.set()
            first._thread.join(30)
            assert not first._thread.is_alive()
            assert first.totals().total(first.totals().uploaded_blocks) == 3
            assert settings.agent.socket.exists(), "it leaves its successor's socket alone"
            assert wait_for(second, lambda: second.agent is not None)
            engine.close()
            late = FakeEngine.start(settings, spec)
            assert wait_for(second, lambda: second.namespace(spec).catalog_open.is_set())
            assert late.load(late.chain(1, 3)) == 3
            late.close()


def test_arenas_larger_than_memory_are_refused_in_one_line(tmp_path: Path) -> None:
    agent = AgentProcess(agent_settings(tmp_path, tier={"capacity_bytes": 1 << 50}), wait=False)
    assert agent.process.wait(60) == 1
    assert agent.log.startswith("s3kv: tier.capacity_bytes: ") and agent.log.count("\n") == 1


def test_without_descriptors_an_agent_refuses_and_then_serves_again(tmp_path: Path) -> None:
    settings, spec = prompt(tmp_path), small_spec()
    with agent_process(settings, limits={resource.RLIMIT_NOFILE: 48}) as agent:
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 3))
        crowd = []
        for _ in range(60):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            client.settimeout(5)
            client.connect(str(settings.agent.socket))
            crowd.append(client)
        assert engine.load(engine.chain(1, 3)) == 3, "those who are connected are served"
        for client in crowd:
            client.close()
        agent.until(agent.answers)
        agent.until(lambda: agent.status()["totals"]["uploaded_blocks"] == 3)
        engine.save(engine.chain(2, 3))
        agent.until(lambda: agent.status()["totals"]["uploaded_blocks"] == 6)
        engine.close()


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_flushes_within_its_deadline_and_says_what_it_could_not(tmp_path: Path, signal_number: int) -> None:
    """Against an endpoint where nobody listens; 1 tells a service manager that something was lost."""
    unreachable = {
        "url": "s3://bucket/prefix",
        "endpoint": "http://127.0.0.1:1",
        "region": "us-east-1",
        "access_key_id": "key",
        "secret_access_key": "not-to-be-printed",
    }
    settings, spec = prompt(tmp_path, agent={"drain_s": 0.5}, store=unreachable), small_spec()
    with agent_process(settings) as agent:
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 5))
        agent.process.send_signal(signal_number)
        assert agent.process.wait(30) == 1
        assert "drained: 0 chunks stored, 5 blocks not stored" in agent.log
        assert "Traceback" not in agent.log
        assert "not-to-be-printed" not in agent.log
        engine.close()


def test_sigterm_flushes_what_can_be_flushed(tmp_path: Path) -> None:
    settings, spec = prompt(tmp_path, upload={"seal_age_s": 1000.0}), small_spec()
    with agent_process(settings) as agent:
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 5))
        assert agent.terminate() == 0
        assert "drained: 1 chunks stored, 0 blocks not stored" in agent.log
        engine.close()


def test_descriptors_threads_and_memory_are_where_they_were_after_many_engines(tmp_path: Path) -> None:
    settings, spec = prompt(tmp_path), small_spec(shards=2)
    with agent_process(settings) as agent:

        def used() -> tuple[int, int]:
            proc = Path(f"/proc/{agent.process.pid}")
            return sum(1 for _ in (proc / "fd").iterdir()), sum(1 for _ in (proc / "task").iterdir())

        def anonymous_kib() -> int:
            status = Path(f"/proc/{agent.process.pid}/status").read_text()
            return int(status.partition("RssAnon:")[2].split()[0])

        def visit(number: int) -> None:
            engine = FakeEngine.start(settings, spec, name=f"engine {number}")
            engine.save(engine.chain(number % 5, 3))
            engine.load(engine.chain(number % 5, 3))
            engine.close()

        for number in range(10):
            visit(number)
        agent.until(lambda: agent.status()["namespaces"][0]["engines"] == 0)
        before, memory = used(), anonymous_kib()
        for number in range(60):
            visit(number)
        agent.until(lambda: agent.status()["namespaces"][0]["engines"] == 0)
        agent.until(lambda: used()[0] <= before[0] + 1)
        assert used()[1] <= before[1] + 2
        assert anonymous_kib() <= memory + 8192


def test_a_client_of_another_version_learns_what_to_do(tmp_path: Path) -> None:
    settings = prompt(tmp_path)
    with agent_process(settings) as agent, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(20)
        client.connect(str(settings.agent.socket))
        client.sendall(p.encode(p.Hello(1, p.PROTOCOL + 1, "worker")))
        size = int.from_bytes(client.recv(4), "little")
        reply = p.decode_reply(client.recv(size))
        assert isinstance(reply, p.Refused) and "restart the agent" in reply.text
        assert agent.answers()


def test_nobody_listens_is_said_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(AgentUnavailable, match=r"agent\.socket"):
        Connection.open(tmp_path / "none.sock", "cli", timeout_s=1.0)
