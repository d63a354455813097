"""Engines that the runtime drops without `shutdown`."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from support.connector_rig import use_agent
from support.fake_agent import FakeAgent, FakeLeader

from s3kv.connector.dropping import when_dropped
from s3kv.sim import SimConfig, install
from s3kv.sim.llm_args import make_llm_args

PATIENCE_S = 20.0


class Pool(np.ndarray):
    """KV memory whose end can be seen."""


def finale(owner: object) -> threading.Event:
    gone = threading.Event()
    weakref.finalize(owner, gone.set)
    return gone


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_dropped_engine_leaves_neither_memory_nor_threads_nor_connections(
    in_a_cycle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent(8)
    use_agent(monkeypatch, agent)
    told_off = threading.Event()
    monkeypatch.setattr(FakeLeader, "close", lambda self: told_off.set())
    args = make_llm_args(SimConfig(manager="v1"), None, 0)  # type: ignore[arg-type]  # outlives the engine
    before = set(threading.enumerate())
    with install():
        import s3kv.connector

        worker = s3kv.connector.S3KVWorker(args)
        scheduler = s3kv.connector.S3KVScheduler(args)
    pool = np.zeros((8, 2, 2, 64), np.float32).view(Pool)
    worker.register_kv_caches(torch.from_numpy(pool))
    assert scheduler.planner is not None
    threads = set(threading.enumerate()) - before
    assert threads
    if in_a_cycle:
        worker.neighbour, scheduler.neighbour = scheduler, worker  # type: ignore[attr-defined]
    ends = [finale(each) for each in (worker, scheduler, pool)]
    del worker, scheduler, pool
    gc.collect()
    assert all(end.wait(PATIENCE_S) for end in ends)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert told_off.wait(PATIENCE_S)


def test_what_was_called_off_does_not_happen() -> None:
    class Owner:
        pass

    happened, expected = threading.Event(), threading.Event()
    kept, dropped = Owner(), Owner()
    when_dropped(kept, happened.set)()
    when_dropped(dropped, expected.set)
    del kept, dropped
    assert expected.wait(PATIENCE_S) and not happened.is_set()


def test_closing_waits_for_nothing_that_the_dropping_thread_holds() -> None:
    class Owner:
        pass

    lock, closed = threading.Lock(), threading.Event()

    def close() -> None:
        with lock:
            closed.set()

    owner = Owner()
    when_dropped(owner, close)
    with lock:
        del owner
    assert closed.wait(PATIENCE_S)
