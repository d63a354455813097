"""The engine's client and a living agent whose connection breaks, or that stops reading."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from support.agents import FakeEngine, agent_settings, running_agent, small_spec

from s3kv.client import protocol as p
from s3kv.client.connection import MAX_OUTBOX_BYTES, Connection
from s3kv.client.engine import WorkerClient
from s3kv.errors import AgentTimeout, AgentUnavailable
from s3kv.store.memory import MemoryStore
from s3kv.tier.arena import Arena


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    return agent_settings(tmp_path, agent={"reconnect_s": 1e-6})


def test_what_was_told_while_the_connection_was_broken_is_told_once_it_is_back(settings: Any) -> None:
    """A lease, or a reservation, ends with its process otherwise, which may be weeks later."""
    spec = small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        chain, other = engine.chain(1, 4), engine.chain(2, 3)
        engine.save(chain)
        offer = engine.match(chain)
        worker = engine.workers[0]
        part = worker.write_parts[0]
        reservation = worker.reserve(part, bytes(16), 0, other)
        assert worker._connection is not None
        worker._connection.close()
        worker.release(offer.lease, offer.epoch)
        worker.commit(part, reservation, [0, 1])
        worker.abandon(part, reservation, [2])
        counters = agent.call(lambda: agent.namespace(spec).directory.counters())
        assert (counters.pinned, counters.arriving) == (4, 3)
        assert worker.connect()
        engine.settle()
        counters = agent.call(lambda: agent.namespace(spec).directory.counters())
        assert (counters.pinned, counters.arriving, counters.resident) == (0, 0, 6)
        engine.close()


def test_what_was_meant_for_an_agent_that_is_gone_is_not_told_to_the_next(settings: Any) -> None:
    spec = small_spec()
    with running_agent(settings, MemoryStore()):
        engine = FakeEngine.start(settings, spec)
        chain = engine.chain(1, 4)
        engine.save(chain)
        offer = engine.match(chain)
    worker = engine.workers[0]
    worker.release(offer.lease, offer.epoch)
    with running_agent(settings, MemoryStore(), seed=1) as agent:
        assert worker.connect() and engine.leader.connect()
        assert engine.save(chain) == 4
        again = engine.match(chain)
        assert again.lease == offer.lease, "agents count their leases alike"
        assert worker.connect()
        engine.settle()
        assert agent.call(lambda: agent.namespace(spec).directory.counters()).pinned == 4
        engine.close()


def test_calls_to_an_agent_that_does_not_read_do_not_pile_up() -> None:
    here, there = socket.socketpair()
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    connection = Connection(here, clock)
    message = p.Match(1, 1, bytes(16 * p.MAX_BLOCKS), 0, 0.0, 0.0)
    with pytest.raises(AgentUnavailable, match="does not read"):
        for _ in range(2 * MAX_OUTBOX_BYTES // len(message.hashes)):
            try:
                connection.call(message, p.Matched, timeout_s=0.5)
            except AgentTimeout:
                continue
    assert connection.closed
    there.close()


def memory_descriptors() -> int:
    """How many descriptors of arenas this process has open, the agent in it included."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += "memfd:" in str(descriptor.readlink())
    return found


def test_arenas_stay_mapped_once_when_the_connection_to_the_same_agent_is_made_again(settings: Any) -> None:
    """Mapping means registering with CUDA: some 45 s for 100 GiB, and nobody would unmap the first one."""
    spec = small_spec()
    mapped: list[Arena] = []
    with running_agent(settings, MemoryStore()):
        worker = WorkerClient(
            settings, spec, rank=0, ranks=1, engine_id="e",
            on_arena=lambda arena, may_pin: mapped.append(arena), on_arena_gone=mapped.remove,
        )  # fmt: skip
        assert worker.connect()
        epoch, part = worker.epoch, worker.read_parts[0]
        (first,) = mapped
        descriptors = memory_descriptors()
        assert worker._connection is not None
        worker._connection.close()
        assert worker.connect()
        assert (mapped, worker.epoch, worker.arena(epoch, part)) == ([first], epoch, first)
        assert memory_descriptors() == descriptors
        worker.close()
        assert mapped == []


def test_what_a_slow_thread_still_has_to_tell_an_agent_that_is_gone_is_not_told_to_the_next(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread sleeps between taking the message and the socket until the client is attached to the next run."""
    spec = small_spec()
    held, go = threading.Event(), threading.Event()
    with running_agent(settings, MemoryStore()):
        engine = FakeEngine.start(settings, spec)
        chain = engine.chain(1, 4)
        engine.save(chain)
        offer = engine.match(chain)
        worker = engine.workers[0]
        post = Connection.post

        def slow(self: Connection, message: Any) -> None:
            if threading.current_thread() is loader:
                held.set()
                assert go.wait(20)
            post(self, message)

        loader = threading.Thread(target=worker.release, args=(offer.lease, offer.epoch))
        monkeypatch.setattr(Connection, "post", slow)
        loader.start()
        assert held.wait(20)
    with running_agent(settings, MemoryStore(), seed=1) as agent:
        assert worker.connect() and engine.leader.connect()
        assert engine.save(chain) == 4
        assert engine.match(chain).lease == offer.lease, "agents count their leases alike"
        go.set()
        loader.join()
        worker.release(99, worker.epoch)  # whatever is told next takes along what is left
        engine.settle()
        assert agent.call(lambda: agent.namespace(spec).directory.counters()).pinned == 4
        engine.close()
