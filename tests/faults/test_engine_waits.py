"""The engine's side under an injected clock: how long a call waits, how pauses grow, what happens to late answers."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import agent_settings, small_chain, small_spec
from support.silent_agent import Clock, SilentAgent, attached, mapped, welcome

from s3kv.client import protocol as p
from s3kv.client.connection import MAX_OUTBOX_BYTES
from s3kv.client.engine import LeaderClient, Offer, WorkerClient
from s3kv.client.reconnecting import MAX_PAUSE_FACTOR
from s3kv.settings import Settings

SPEC = small_spec()
CALL_S, CAP_S, RECONNECT_S = 0.25, 0.3, 1.0
CHAIN = small_chain(SPEC, 1, 8)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return agent_settings(
        tmp_path,
        agent={"call_timeout_s": CALL_S, "reconnect_s": RECONNECT_S},
        load={"wait_cap_ms": CAP_S * 1000},
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


def leader(settings: Settings, clock: Clock) -> LeaderClient:
    return LeaderClient(settings, SPEC, ranks=1, engine_id="engine", clock=clock)


def worker(settings: Settings, clock: Clock) -> WorkerClient:
    return WorkerClient(settings, SPEC, rank=0, ranks=1, engine_id="engine", clock=clock)


@pytest.fixture
def silent(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentAgent]:
    agent = SilentAgent(clock, [])
    agent.install(monkeypatch)
    yield agent
    agent.close()


matched = p.encode(p.Matched(3, 9, p.pack_u32([1, 2]), 0, 0.0))
STEPS = {
    "nobody listens": None,
    "no welcome": b"",
    "half a welcome": welcome()[:7],
    "no place": welcome(),
    "no answer": welcome() + attached(),
    "half an answer": welcome() + attached() + matched[:-3],
}


@pytest.mark.parametrize("step", STEPS)
def test_a_match_waits_no_longer_than_its_budget_and_one_call(
    settings: Settings, clock: Clock, silent: SilentAgent, step: str
) -> None:
    answers = STEPS[step]
    silent.answers = [] if answers is None else [answers]
    client, began = leader(settings, clock), clock.now
    assert client.match(CHAIN) == Offer()
    assert clock.now - began <= CAP_S + CALL_S + 1e-9
    client.close()


@pytest.mark.parametrize("delay_s", [0.05, 0.1, 0.2, 0.24])
def test_slow_answers_to_each_step_of_connecting_do_not_add_up(
    settings: Settings, clock: Clock, silent: SilentAgent, delay_s: float
) -> None:
    silent.answers, silent.delay_s = [welcome() + attached() + matched] * 9, delay_s
    client, began = leader(settings, clock), clock.now
    client.match(CHAIN)
    assert clock.now - began <= CAP_S + CALL_S + 1e-9
    client.close()


@pytest.mark.parametrize("step", STEPS)
def test_a_reservation_waits_no_longer_than_one_call(
    settings: Settings, clock: Clock, silent: SilentAgent, step: str
) -> None:
    answers = STEPS[step]
    silent.answers = [] if answers is None else [answers]
    client, began = worker(settings, clock), clock.now
    assert client.reserve(0, bytes(16), 0, CHAIN).slots == [-1] * 8
    assert clock.now - began <= CALL_S + 1e-9
    client.close()


@pytest.mark.parametrize("step", ["nobody listens", "no welcome", "no place", "no answer"])
def test_pauses_double_up_to_their_limit(settings: Settings, clock: Clock, silent: SilentAgent, step: str) -> None:
    """An hour with a request every 100 ms: the engine waits for a dead agent a hundred times, not 36,000 times."""
    answers = STEPS[step]
    silent.answers = [] if answers is None else [answers] * 1000
    client = leader(settings, clock)
    waited, tried, end = 0.0, [], clock.now + 3600.0
    while clock.now < end:
        began = clock.now
        client.match(CHAIN)
        if clock.now > began or client.stats["calls_in_pause"] == 0:
            tried.append(began)
        waited += clock.now - began
        clock.now += 0.1
    assert waited <= (3600 / (MAX_PAUSE_FACTOR * RECONNECT_S) + 7) * (CALL_S + CAP_S)
    pauses = [late - early for early, late in zip(silent.opened_at, silent.opened_at[1:], strict=False)]
    assert max(pauses, default=0.0) <= MAX_PAUSE_FACTOR * RECONNECT_S + CALL_S + CAP_S + 0.2
    if step != "no answer":
        assert pauses[0] < 1.6 and pauses[5] > 30.0
    client.close()


def test_an_answer_ends_the_pause_that_had_grown(settings: Settings, clock: Clock, silent: SilentAgent) -> None:
    client = leader(settings, clock)
    for _ in range(5):
        client.match(CHAIN)
        clock.now = client._next_try
    silent.answers = [welcome() + attached() + matched]
    assert client.match(CHAIN).slots == [1, 2]
    silent.peers[-1].close()
    client.match(CHAIN)
    client.match(CHAIN)
    assert client._next_try - clock.now <= RECONNECT_S
    client.close()


def test_a_late_lease_is_given_back_by_the_next_call(settings: Settings, clock: Clock, silent: SilentAgent) -> None:
    silent.answers = [welcome() + attached()]
    client = leader(settings, clock)
    assert client.match(CHAIN) == Offer()
    silent.say(p.Matched(3, 77, p.pack_u32([4]), 0, 0.0))
    assert client.match(CHAIN) == Offer(), "in its pause it does not even ask"
    clock.now += RECONNECT_S
    silent.say(p.Matched(4, 78, p.pack_u32([5]), 0, 0.0))
    silent.heard()
    offer = client.match(CHAIN)
    assert (offer.lease, offer.slots) == (78, [5]), "its own answer, not the late one"
    assert [each.lease for each in silent.heard() if isinstance(each, p.Release)] == [77]
    assert client.stats["late_matches"] == 1
    client.close()


def test_at_start_up_an_agent_that_is_busy_has_the_whole_time_for_each_step(
    settings: Settings, clock: Clock, silent: SilentAgent
) -> None:
    silent.answers, silent.delay_s = [welcome() + attached() + mapped()], 4 * CALL_S
    client = worker(settings, clock)
    assert client.connect()
    client.close()


@pytest.mark.parametrize("delay_s", [0.05, 0.1, 0.2, 0.24])
def test_slow_answers_to_a_rank_that_attaches_do_not_add_up(
    settings: Settings, clock: Clock, silent: SilentAgent, delay_s: float
) -> None:
    reserved = p.encode(p.Reserved(4, p.pack_u32([1] * 8), p.pack_u32([1] * 8)))
    silent.answers, silent.delay_s = [welcome() + attached() + mapped() + reserved] * 9, delay_s
    client, began = worker(settings, clock), clock.now
    client.reserve(0, bytes(16), 0, CHAIN)
    assert clock.now - began <= CALL_S + 1e-9
    client.close()


def test_a_late_reservation_is_abandoned(settings: Settings, clock: Clock, silent: SilentAgent) -> None:
    silent.answers = [welcome() + attached() + mapped()]
    client = worker(settings, clock)
    client.reserve(0, bytes(16), 0, CHAIN[:2])
    clock.now += RECONNECT_S
    silent.say(p.Reserved(4, p.pack_u32([6, p.NO_SLOT]), p.pack_u32([1, 0])))
    silent.say(p.Reserved(5, p.pack_u32([7]), p.pack_u32([2])))
    silent.heard()
    assert client.reserve(0, bytes(16), 0, CHAIN[:1]).slots == [7]
    (abandon,) = [each for each in silent.heard() if isinstance(each, p.Abandon)]
    assert (list(p.unpack_u32(abandon.slots)), list(p.unpack_u32(abandon.tickets))) == ([6], [1])
    client.close()


def test_telling_an_agent_that_does_not_read_never_waits_and_is_bounded(
    settings: Settings, clock: Clock, silent: SilentAgent
) -> None:
    reserved = p.encode(p.Reserved(4, p.pack_u32([1] * 8), p.pack_u32([1] * 8)))
    silent.answers = [welcome() + attached() + mapped() + reserved]
    client = worker(settings, clock)
    reservation = client.reserve(0, bytes(16), 0, CHAIN)
    began = clock.now
    connection = client._connection
    assert connection is not None
    frame = len(p.encode(p.Commit(1, 0, p.pack_u32(reservation.slots), p.pack_u32(reservation.tickets))))
    for _ in range(2 * MAX_OUTBOX_BYTES // frame):
        client.commit(0, reservation, range(8))
        if connection.closed:
            break
    assert connection.closed and clock.now == began
    assert client.stats["agent_unavailable"] == 1
    client.close()


@pytest.mark.parametrize("answer", ["other kind", "garbage", "too long", "wrong count"])
def test_an_agent_that_breaks_the_protocol_is_a_miss(
    settings: Settings, clock: Clock, silent: SilentAgent, answer: str
) -> None:
    wrong = {
        "other kind": p.encode(p.Done(4, 1)),
        "garbage": p.LENGTH.pack(5) + b"\xc1\xc1\xc1\xc1\xc1",
        "too long": p.LENGTH.pack(0xFFFFFFFF),
        "wrong count": p.encode(p.Reserved(4, p.pack_u32([1]), p.pack_u32([1]))),
    }[answer]
    silent.answers = [welcome() + attached() + mapped() + wrong]
    client = worker(settings, clock)
    assert client.reserve(0, bytes(16), 0, CHAIN).slots == [-1] * 8
    assert client.epoch == 0
    client.close()


def test_an_agent_of_another_version_is_an_absent_agent(settings: Settings, clock: Clock, silent: SilentAgent) -> None:
    silent.answers = [p.encode(p.Refused(1, "this agent speaks protocol 9", fatal=True))] * 50
    client = leader(settings, clock)
    assert not client.connect()
    for _ in range(100):
        assert client.match(CHAIN) == Offer()
        clock.now += 1.0
    assert client.stats["agent_unavailable"] < 10
    client.close()


def test_without_a_descriptor_left_every_call_is_a_miss(tmp_path: Path) -> None:
    settings = agent_settings(tmp_path, agent={"autostart": True, "start_timeout_s": 0.01, "reconnect_s": 0.001})
    clock = Clock()
    clients = [leader(settings, clock), worker(settings, clock)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        lowest = probe.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        outcomes = [client.connect() for client in clients]
        clock.now += 100.0
        outcomes += [clients[0].match(CHAIN) == Offer(), clients[1].reserve(0, bytes(16), 0, CHAIN).epoch == 0]  # type: ignore[attr-defined]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert outcomes == [False, False, True, True]
    for client in clients:
        client.close()
