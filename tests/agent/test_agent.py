"""The agent through its real socket: save, upload, load, restart, and what clients may do to it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.agents import FakeEngine, RunningAgent, agent_settings, running_agent, small_spec

from s3kv.client import protocol as p
from s3kv.client.connection import Connection
from s3kv.errors import AgentUnavailable, ConfigError
from s3kv.format.keys import chunks_prefix
from s3kv.store.base import ObjectMeta
from s3kv.store.memory import MemoryStore


async def listed(store: MemoryStore, prefix: str) -> list[ObjectMeta]:
    return [meta async for page in store.list(prefix) for meta in page]


@pytest.mark.parametrize("shards", [1, 2])
def test_what_was_saved_is_offered_with_its_bytes(tmp_path: Path, shards: int) -> None:
    settings, spec = agent_settings(tmp_path), small_spec(shards=shards)
    with running_agent(settings):
        engine = FakeEngine.start(settings, spec)
        chain = engine.chain(1, 6)
        assert engine.match(chain).slots == []
        assert engine.save(chain) == 6
        assert engine.load(chain) == 6
        assert engine.save(chain) == 0, "resident blocks are not written again"
        assert engine.load([*chain[:3], *engine.chain(2, 3)]) == 3
        engine.close()


def test_prompts_of_more_blocks_than_a_message_may_name_are_served_as_far_as_it_goes(tmp_path: Path) -> None:
    settings, spec = agent_settings(tmp_path), small_spec()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, spec)
        chain = engine.chain(1, 4)
        assert engine.save(chain) == 4
        huge = [*chain, *(struct.pack("<QQ", 7, block) for block in range(p.MAX_BLOCKS))]
        assert engine.load(huge) == 4
        assert engine.leader.match(huge, first_block=len(huge) - 1).slots == []
        worker = engine.workers[0]
        part = worker.write_parts[0]
        reservation = worker.reserve(part, bytes(16), 0, huge)
        assert len(reservation.slots) == len(reservation.tickets) == len(huge)
        assert reservation.slots[-1] == -1
        worker.abandon(part, reservation, [index for index, slot in enumerate(reservation.slots) if slot >= 0])
        assert engine.load(chain) == 4
        assert agent.totals().total(agent.totals().refused_clients) == 0
        engine.close()


def test_a_block_is_offered_only_when_every_shard_has_committed_it(tmp_path: Path) -> None:
    settings, spec = agent_settings(tmp_path), small_spec(shards=2)
    with running_agent(settings):
        engine = FakeEngine.start(settings, spec)
        chain = engine.chain(1, 2)
        first, second = engine.workers
        for worker in (first, second):
            reservation = worker.reserve(worker.write_parts[0], bytes(16), 0, chain)
            assert engine.match(chain).slots == []
            worker.commit(worker.write_parts[0], reservation, [0, 1])
        engine.settle()
        assert len(engine.match(chain).slots) == 2
        engine.close()


def test_a_new_agent_and_engine_load_what_the_old_ones_stored(tmp_path: Path) -> None:
    spec, store = small_spec(shards=2), MemoryStore()
    first = agent_settings(tmp_path / "a")
    with running_agent(first, store) as agent:
        engine = FakeEngine.start(first, spec)
        chain = engine.chain(1, 9)
        engine.save(chain)
        engine.leader.finished(chain[-1])
        agent.until(lambda: agent.totals().total(agent.totals().saved_blocks) == 9)
        _, unsaved = agent.drain()
        assert unsaved == 0
        engine.close()
    second = agent_settings(tmp_path / "b")
    with running_agent(second, store, seed=1) as agent:
        engine = FakeEngine.start(second, spec)
        agent.until(agent.namespace(spec).catalog_open.is_set)
        assert engine.load(chain) == 9
        assert engine.load(chain) == 9
        engine.save(chain)
        agent.drain()
        assert agent.totals().total(agent.totals().uploaded_chunks) == 0, "what the bucket holds is not stored again"
        engine.close()


def test_two_agents_that_store_the_same_chunk_leave_one_object_and_both_serve_it(tmp_path: Path) -> None:
    spec, store = small_spec(), MemoryStore()
    settings = [agent_settings(tmp_path / name, upload={"seal_age_s": 1000.0}) for name in "ab"]
    with running_agent(settings[0], store, 1) as a, running_agent(settings[1], store, 2) as b:
        engines = [FakeEngine.start(each, spec) for each in settings]
        for agent in (a, b):
            agent.until(agent.namespace(spec).catalog_open.is_set)
        chain = engines[0].chain(1, 4)
        for engine, agent in zip(engines, (a, b), strict=True):
            engine.save(chain)
            agent.until(lambda agent=agent: agent.totals().total(agent.totals().saved_blocks) == 4)  # type: ignore[misc]
        assert a.drain()[1] == b.drain()[1] == 0
        metas = a.call(lambda: listed(store, chunks_prefix(spec.name)))
        assert len(metas) == 2, "one object for each layer group"
        for engine, agent in zip(engines, (a, b), strict=True):
            agent.forget()
            assert engine.load(chain) == 4
            engine.close()


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "foreign", "header"])
def test_case_20_damaged_objects_are_a_miss_and_are_forgotten(tmp_path: Path, damage: str) -> None:
    spec, store = small_spec(), MemoryStore()
    settings = agent_settings(tmp_path)
    with running_agent(settings, store) as agent:
        engine = FakeEngine.start(settings, spec)
        agent.until(agent.namespace(spec).catalog_open.is_set)
        chain, other = engine.chain(1, 4), engine.chain(2, 4)
        for each in (chain, other):
            engine.save(each)
        agent.until(lambda: agent.totals().total(agent.totals().saved_blocks) == 8)
        agent.drain()
        place = agent.namespace(spec).catalog.lookup(chain)[0]
        elsewhere = agent.namespace(spec).catalog.lookup(other)[0]

        async def harm() -> None:
            from s3kv.format.keys import chunk_key

            key = chunk_key(spec.name, place.chunk_id, 1)
            data = bytearray(await store.get(key, 1 << 20))
            match damage:
                case "missing":
                    await store.delete([key])
                    return
                case "cut":
                    del data[-100:]
                case "flipped":
                    data[-1] ^= 1
                case "header":
                    data[40] ^= 1
                case "foreign":
                    data = bytearray(await store.get(chunk_key(spec.name, elsewhere.chunk_id, 1), 1 << 20))
            await store.put(key, bytes(data))

        agent.call(harm)
        agent.forget()
        assert engine.load(chain) == 0
        assert agent.totals().total(agent.totals().repairs) == 1
        assert agent.namespace(spec).catalog.lookup(chain) == []
        assert engine.load(other) == 4
        engine.save(chain)
        agent.until(lambda: agent.totals().total(agent.totals().saved_blocks) == 12)
        agent.drain()
        agent.forget()
        assert engine.load(chain) == 4, "storing it again heals it"
        engine.close()


def test_without_all_ranks_nothing_is_offered_and_twins_are_noticed(tmp_path: Path) -> None:
    from s3kv.client.engine import WorkerClient

    settings, spec = agent_settings(tmp_path), small_spec(shards=2)
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, spec)
        chain = engine.chain(1, 2)
        engine.save(chain)
        assert engine.load(chain) == 2
        engine.workers[1].close()
        engines = agent.namespace(spec).engines
        agent.until(lambda: not engines._by_name["engine"].members[1])
        assert engine.match(chain).slots == []
        assert engine.leader.stats["not_offered"] == 1
        again = WorkerClient(settings, spec, rank=1, ranks=2, engine_id="engine")
        assert again.connect()
        assert len(engine.match(chain).slots) == 2
        engine.close()
        again.close()


def test_nothing_is_offered_before_every_rank_has_mapped_the_arena(tmp_path: Path) -> None:
    """Registering an arena with CUDA takes a minute: an offer that comes first could not be kept."""
    from s3kv.client.engine import LeaderClient, WorkerClient

    settings, spec = agent_settings(tmp_path), small_spec()
    registering, registered = threading.Event(), threading.Event()

    def slow(arena: object, may_pin: bool) -> None:
        registering.set()
        assert registered.wait(60)

    with running_agent(settings):
        first = FakeEngine.start(settings, spec, name="first")
        chain = first.chain(1, 2)
        first.save(chain)
        leader = LeaderClient(settings, spec, ranks=1, engine_id="second")
        worker = WorkerClient(settings, spec, rank=0, ranks=1, engine_id="second", on_arena=slow)
        assert leader.connect()
        attaching = threading.Thread(target=worker.connect)
        attaching.start()
        assert registering.wait(60)
        assert leader.match(chain).slots == [] and leader.stats["not_offered"] == 1
        registered.set()
        attaching.join(60)
        offer = leader.match(chain)
        assert len(offer.slots) == 2 and worker.arena(offer.epoch, 0) is not None
        for each in (first, worker, leader):
            each.close()


HOLDER = """
import sys
from pathlib import Path
from support.agents import FakeEngine, agent_settings, small_spec
engine = FakeEngine.start(agent_settings(Path(sys.argv[1])), small_spec(), name="other")
chain = engine.chain(1, 3)
offer = engine.match(chain)
engine.save(engine.chain(5, 2), commit=False)
print(len(offer.slots), flush=True)
if sys.argv[2] == "close":
    engine.close()
    print("closed", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["hold", "close"])
def test_pins_and_reservations_last_exactly_as_long_as_their_process(tmp_path: Path, how: str) -> None:
    settings, spec = agent_settings(tmp_path), small_spec()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 3))
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline().strip() == "3"
        if how == "close":
            assert holder.stdout.readline().strip() == "closed"
            agent.until(lambda: agent.namespace(spec).directory.counters().quarantined == 5)
        counters = agent.call(lambda: agent.namespace(spec).directory.counters())
        assert (counters.pinned, counters.arriving) == (3, 2)
        holder.kill()
        holder.wait()
        agent.until(lambda: agent.namespace(spec).directory.counters().pinned == 0)
        counters = agent.call(lambda: agent.namespace(spec).directory.counters())
        assert (counters.pinned, counters.arriving, counters.quarantined) == (0, 0, 0)
        holder.stdin.close()
        holder.stdout.close()
        assert engine.load(engine.chain(1, 3)) == 3
        engine.close()


def raw_client(settings_socket: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(20)
    client.connect(str(settings_socket))
    return client


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 0xFFFFFFFF) + b"x",
        struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack("<I", 0),
        p.encode(p.Status(1)),
        p.encode(p.Hello(1, p.PROTOCOL, "cli")) + p.encode(p.Release(1, 1, 0)),
        p.encode(p.Hello(1, p.PROTOCOL, "worker")) + p.encode(p.Commit(3, 0, b"", b"")),
        p.encode(p.Hello(1, p.PROTOCOL, "worker")) + p.encode(p.Match(2, 1, b"abc", 0, 0.0, 0.0)),
    ],
    ids=["http", "huge", "not msgpack", "empty", "no hello", "cli release", "unattached", "bad hashes"],
)
def test_garbage_ends_one_connection_and_nothing_else(tmp_path: Path, garbage: bytes) -> None:
    settings, spec = agent_settings(tmp_path), small_spec()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 2))
        with raw_client(settings.agent.socket) as client:
            client.sendall(garbage)
            while client.recv(4096):
                pass
        agent.until(lambda: agent.totals().total(agent.totals().refused_clients) == 1)
        assert engine.load(engine.chain(1, 2)) == 2
        engine.close()


def test_hostile_requests_of_an_attached_worker_are_refused(tmp_path: Path) -> None:
    settings, spec = agent_settings(tmp_path), small_spec()
    with running_agent(settings) as agent:
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 2))
        worker = engine.workers[0]
        connection = worker._connection
        assert connection is not None
        for slot in (0, 1, 5, 10**6, 0xFFFFFFFE):
            connection.post(p.Commit(1, 0, p.pack_u32([slot]), p.pack_u32([1])))
            connection.post(p.Abandon(1, 0, p.pack_u32([slot, slot]), p.pack_u32([9])))
            connection.post(p.Release(1, slot, 0))
        assert engine.load(engine.chain(1, 2)) == 2
        agent.call(lambda: agent.namespace(spec).directory.check())
        connection.post(p.Commit(1, 7, p.pack_u32([0]), p.pack_u32([1])))
        with pytest.raises(AgentUnavailable):
            connection.call(p.Status(connection.next_id()), p.Report, timeout_s=20)
        engine.close()


def test_another_protocol_is_refused_with_the_remedy(tmp_path: Path) -> None:
    settings = agent_settings(tmp_path)
    with running_agent(settings), raw_client(settings.agent.socket) as client:
        client.sendall(p.encode(p.Hello(1, p.PROTOCOL + 1, "leader")))
        (length,) = struct.unpack("<I", client.recv(4))
        reply = p.decode_reply(client.recv(length))
        assert isinstance(reply, p.Refused) and "restart the agent" in reply.text


def test_one_agent_a_socket_and_a_leftover_socket_is_replaced(tmp_path: Path) -> None:
    settings = agent_settings(tmp_path)
    with socket.socket(socket.AF_UNIX) as leftover:
        leftover.bind(str(settings.agent.socket))
    with running_agent(settings):
        assert (settings.agent.socket.stat().st_mode & 0o777) == 0o600
        with pytest.raises(ConfigError, match="another agent is serving"):
            RunningAgent(settings)
        Connection.open(settings.agent.socket, "cli", timeout_s=5).close()
    assert not settings.agent.socket.exists()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_socket_is_never_removed(tmp_path: Path, kind: str) -> None:
    settings = agent_settings(tmp_path)
    path = settings.agent.socket
    path.mkdir() if kind == "folder" else path.write_text("notes")
    with pytest.raises(ConfigError, match=r"agent\.socket: .* is there and is no socket"):
        RunningAgent(settings)
    assert path.is_dir() if kind == "folder" else path.read_text() == "notes"


def test_a_client_that_never_reads_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3kv.agent.server.WRITE_TIMEOUT_S", 0.05)
    settings = agent_settings(tmp_path)
    with running_agent(settings) as agent, raw_client(settings.agent.socket) as client:
        client.sendall(p.encode(p.Hello(1, p.PROTOCOL, "cli")))
        with pytest.raises(OSError):
            while True:
                client.sendall(p.encode(p.Metrics(2)) * 50)
        agent.until(lambda: agent.totals().total(agent.totals().refused_clients) == 1)


def test_status_and_metrics_speak_the_glossary(tmp_path: Path) -> None:
    settings, spec = agent_settings(tmp_path), small_spec()
    with running_agent(settings):
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 3))
        assert engine.load(engine.chain(1, 3)) == 3
        connection = Connection.open(settings.agent.socket, "cli", timeout_s=5)
        status = json.loads(connection.call(p.Status(connection.next_id()), p.Report, timeout_s=5).text)
        assert status["namespaces"][0]["namespace"] == spec.name
        assert status["totals"]["saved_blocks"] == 3
        text = connection.call(p.Metrics(connection.next_id()), p.Report, timeout_s=5).text.decode()
        assert 's3kv_matched_blocks_total{found="tier"} 3.0' in text
        looked = connection.call(
            p.Look(connection.next_id(), spec.name, p.join_hashes(engine.chain(1, 5))), p.Looked, timeout_s=5
        )
        assert looked.resident == 3
        connection.close()
        engine.close()
