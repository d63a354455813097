"""Policy park: loads in the background, and what `get_finished` may say of them. And ranks that attach again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agents import FakeEngine, agent_settings, running_agent, small_spec
from support.connector_rig import ALONE, namespace_for, pages_cache
from support.fake_agent import FakeAgent
from support.lazy_device import LazyDevice

from s3kv.client.engine import LeaderClient, WorkerClient
from s3kv.connector.arenas import Arenas
from s3kv.connector.device import HostDevice
from s3kv.connector.guard import Troubles
from s3kv.connector.loader import Loader
from s3kv.connector.metadata import ConnectorMeta, Load, Save
from s3kv.connector.transfers import Transfers
from s3kv.identity import ROOT, GroupSpec, NamespaceSpec, RegionSpec
from s3kv.settings import load_settings
from s3kv.store.memory import MemoryStore

NAME = b"a" * 16
POLLS = 2000


class Rig:
    """One block, saved and moved to the bucket; `park` gives a background load of it to page 5."""

    def __init__(self, fetch_polls: int) -> None:
        self.device = LazyDevice()
        self.cache, self.pools = pages_cache()
        self.namespace = namespace_for(self.cache)
        self.agent = FakeAgent(slots=8, fetch_polls=fetch_polls)
        settings = load_settings(load={"policy": "park"}, agent={"reconnect_s": 0.01})
        self.leader = self.agent.leader(settings, self.namespace, ranks=1, engine_id="e")
        self.troubles = Troubles()
        self.transfers = Transfers(
            settings, self.namespace, self.cache, ALONE, self.device, engine_id="e", ring_blocks=4,
            troubles=self.troubles, client_factory=self.agent.worker,
        )  # fmt: skip
        self.pools[0][3].fill_(11)
        self.transfers.bind(ConnectorMeta(saves=(Save(ROOT, 0, (NAME,), ((3,),)),)))
        self.transfers.snapshot(self.device.forward)
        assert self.transfers.drain(10)
        self.agent.forget_tier()

    def park(self, request_id: int = 1) -> None:
        offer = self.leader.match([NAME])
        assert (offer.slots, offer.pending) == ([], 1)
        load = Load(request_id, offer.lease, offer.epoch, (), ((5,),))
        self.transfers.bind(ConnectorMeta(parked=(load,)))

    def poll(self, until: Callable[[], bool]) -> None:
        """Let the helper thread go on until something is so."""
        for _ in range(POLLS):
            if until():
                return
            assert self.transfers.drain(10)
        raise AssertionError("it never became so")


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(fetch_polls=3)
    yield made
    made.transfers.close()


def loaded_after_polling(rig: Rig, started: list[int]) -> list[int]:
    named: list[int] = []

    def ask() -> bool:
        nonlocal started
        saved, loaded = rig.transfers.finished([], started)
        assert saved == []
        started = []
        named.extend(loaded)
        return bool(loaded)

    rig.poll(ask)
    return named


def test_a_parked_load_is_named_once_and_only_when_its_page_is_written(rig: Rig) -> None:
    rig.device.enqueue(rig.device.forward, lambda: rig.pools[0][5].fill_(77))  # a pass before, still to run
    rig.park()
    assert loaded_after_polling(rig, [1]) == [1]
    assert set(rig.pools[0][5].tolist()) == {11}
    assert rig.transfers.finished([], []) == ([], [])
    rig.agent.check_at_rest()
    assert rig.transfers.loader.idle


def test_ids_that_were_not_given_are_not_named(rig: Rig) -> None:
    rig.park()
    rig.poll(lambda: rig.troubles["blocks_loaded"] == 1)
    assert rig.transfers.finished([], []) == ([], [])
    assert rig.transfers.finished([], [1]) == ([], [1])


def test_a_failed_fetch_is_never_reported_and_the_request_can_still_be_ended(rig: Rig) -> None:
    rig.agent.broken_fetches = False
    rig.park()
    rig.agent.broken_fetches = True
    assert rig.transfers.finished([], [1]) == ([], [])
    rig.poll(lambda: rig.troubles["parked_load"] == 1)
    for _ in range(5):
        assert rig.transfers.finished([], []) == ([], [])
    assert rig.transfers.finished([1], []) == ([1], [])
    assert rig.transfers.finished([], []) == ([], [])
    assert rig.transfers.loader.idle
    assert set(rig.pools[0][5].tolist()) == {200}


def test_cancelled_while_waiting_is_dropped_and_its_lease_released(rig: Rig) -> None:
    blocked = Rig(fetch_polls=1 << 30)
    blocked.park()
    assert blocked.transfers.finished([], [1]) == ([], [])
    assert blocked.transfers.finished([1], []) == ([1], [])
    assert blocked.transfers.loader.idle
    assert blocked.agent.directory(blocked.namespace).leases == {}
    blocked.transfers.close()


def test_cancelled_while_copying_is_named_when_the_copy_is_over(rig: Rig) -> None:
    """The pages are held until nothing writes to them."""
    rig.park()
    answers: list[tuple[list[int], list[int]]] = []
    copy = rig.device.copy

    def copy_and_cancel(copies: object, stream: object) -> None:
        answers.append(rig.transfers.finished([1], [1]))  # the runtime cancels just now
        copy(copies, stream)  # type: ignore[arg-type]

    rig.device.copy = copy_and_cancel  # type: ignore[method-assign]
    rig.poll(lambda: rig.troubles["blocks_loaded"] == 1)
    assert answers == [([], [])]
    assert rig.transfers.finished([], []) == ([1], [1])
    assert rig.transfers.loader.idle


@pytest.mark.parametrize("ended", [False, True], ids=["held", "cancelled meanwhile"])
def test_a_copy_that_fails_ends_with_its_request_once_nothing_writes_to_its_page(rig: Rig, ended: bool) -> None:
    rig.park()
    copy = rig.device.copy

    def copy_and_fail(copies: object, stream: object) -> None:
        if ended:
            assert rig.transfers.finished([1], [1]) == ([], [])
        copy(copies, stream)  # type: ignore[arg-type]

    rig.device.copy = copy_and_fail  # type: ignore[method-assign]
    rig.device.failing_copies = True
    rig.poll(lambda: rig.troubles["parked_load"] == 1)
    assert rig.device.at_rest
    assert rig.transfers.finished([] if ended else [1], []) == ([1], [])
    assert rig.transfers.loader.idle


def test_case_06_a_held_request_is_named_once_though_saving_failed(rig: Rig) -> None:
    rig.agent.alive = False
    assert rig.transfers.finished([9], []) == ([9], [])
    assert rig.transfers.finished([], []) == ([], [])


def test_an_id_used_again_is_another_request(rig: Rig) -> None:
    rig.park()
    assert loaded_after_polling(rig, [1]) == [1]
    rig.agent.forget_tier()
    rig.park()
    assert loaded_after_polling(rig, [1]) == [1]
    assert rig.transfers.loader.idle


def test_case_26_ranks_that_finish_at_different_polls_never_wait_for_each_other() -> None:
    quick, slow = Rig(fetch_polls=1), Rig(fetch_polls=1 << 30)
    quick.park()
    slow.park()
    assert loaded_after_polling(quick, [1]) == [1]
    for _ in range(5):
        assert slow.transfers.finished([], []) == ([], [])
    assert quick.transfers.finished([], []) == ([], [])
    quick.transfers.close()
    slow.transfers.close()


REPLICATED = NamespaceSpec("mla", "w", "bfloat16", 4, (GroupSpec((0,), None, (RegionSpec(1024, replicated=True),)),), 1)


@pytest.mark.parametrize(
    ("spec", "ranks"), [(small_spec(), 1), (REPLICATED, 2)], ids=["saves are off", "replicated KV"]
)
def test_a_rank_that_saves_nothing_is_attached_to_the_next_agent(
    tmp_path: Path, spec: NamespaceSpec, ranks: int
) -> None:
    """It never asks the agent for anything, and without it the whole engine is offered nothing."""
    settings, store, device = agent_settings(tmp_path, agent={"reconnect_s": 0.01}), MemoryStore(), HostDevice()
    workers = [WorkerClient(settings, spec, rank=rank, ranks=ranks, engine_id="e") for rank in range(ranks)]
    engine = FakeEngine(spec, LeaderClient(settings, spec, ranks=ranks, engine_id="e"), workers)
    chain = engine.chain(1, 4)
    with running_agent(settings, store) as agent:
        assert engine.leader.connect() and all(worker.connect() for worker in workers)
        engine.save(chain)
        assert agent.drain()[1] == 0
        first = workers[0].epoch
    loaders = [Loader(worker, device, Arenas(device, "never"), [], Troubles(), reconnect_s=0.01) for worker in workers]
    with running_agent(settings, store, seed=1) as agent:
        agent.until(lambda: all(worker.epoch not in (0, first) for worker in workers))
        assert engine.leader.connect()
        agent.until(agent.namespace(spec).catalog_open.is_set)
        assert engine.load(chain) == 4
        for loader in loaders:
            loader.close(10)
        engine.close()


def test_a_lost_agent_is_looked_for_while_a_parked_load_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would start another one, and the request would be held until it is cancelled."""
    asked = threading.Event()
    connect = rig.transfers.client.connect

    def watched() -> bool:
        asked.set()
        return connect()

    rig.agent.fetch_polls = 1 << 30
    rig.park()
    rig.poll(lambda: bool(rig.transfers.loader._waiting()))
    rig.agent.alive = False
    monkeypatch.setattr(rig.transfers.client, "connect", watched)
    assert asked.wait(10)
    assert rig.transfers.loader._waiting()
