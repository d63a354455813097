"""The two classes that the runtime drives: quiet, complete, and never the reason that it stops, save for a promise."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.connector_rig import FakeRequest, output, report, use_agent
from support.fake_agent import FakeAgent

from s3kv.connector.guard import PromiseBroken
from s3kv.connector.metadata import ConnectorMeta, Load
from s3kv.sim import SimConfig, install
from s3kv.sim.llm_args import make_llm_args

PROMPT = list(range(70))
PAGES = [0, 1, 2, 3, 4]


class Halves:
    """A scheduler and a worker of one engine, with a V1 cache of 16 tokens a block."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import s3kv.connector

        self.agent = FakeAgent(16)
        use_agent(patch, self.agent)
        self.args = make_llm_args(SimConfig(manager="v1"), None, 0)  # type: ignore[arg-type]
        self.scheduler: Any = s3kv.connector.S3KVScheduler(self.args)
        self.worker: Any = s3kv.connector.S3KVWorker(self.args)
        self.pool = torch.zeros(8, 2, 2, 64)

    def register(self) -> None:
        self.worker.register_kv_caches(self.pool)
        self.scheduler.wait_for_initialization()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> Iterator[Halves]:
    with install():
        made = Halves(monkeypatch)
        yield made
        made.close()


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("metadata", [None, ConnectorMeta(), (), {}, 7, "no-op"], ids=repr)
def test_case_11_nothing_to_do_is_done_quietly(halves: Halves, metadata: object, registered: bool) -> None:
    if registered:
        halves.register()
    halves.worker.bind_connector_meta(metadata)
    assert halves.worker.get_connector_meta() is metadata
    halves.worker.start_load_kv(None)
    halves.worker.wait_for_layer_load(0, None)
    halves.worker.save_kv_layer(0, None)
    halves.worker.wait_for_save(None)
    assert halves.worker.get_finished([], []) == ([], [])
    assert halves.worker.get_finished([3], []) == ([3], [])
    assert halves.worker.register_forward_pass_callable() is None
    assert halves.worker.troubles.as_dict() == {}


def test_before_the_cache_is_registered_nothing_is_offered_or_planned(halves: Halves) -> None:
    request = FakeRequest(1, PROMPT)
    assert halves.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    halves.scheduler.update_state_after_alloc(request, PAGES)
    halves.scheduler.cancel_load(request, 0, 16)
    assert halves.scheduler.build_connector_meta(output()) is None
    assert halves.scheduler.request_finished(request, PAGES) is False
    halves.scheduler.wait_for_initialization()


@pytest.mark.parametrize("grouped", [False, True])
def test_both_complete_sets_of_callbacks_serve(halves: Halves, grouped: bool) -> None:
    halves.register()
    torch.manual_seed(0)
    halves.pool.copy_(torch.randn(halves.pool.shape))
    for number, expected in ((1, 0), (2, 64)):
        request = FakeRequest(number, PROMPT)
        assert halves.scheduler.get_num_new_matched_tokens(request, 0) == (expected, False)
        if grouped:
            halves.scheduler.update_state_after_alloc_by_layer_group(request, {0: PAGES})
        else:
            halves.scheduler.update_state_after_alloc(request, PAGES)
        meta = halves.scheduler.build_connector_meta(output([report(number, PROMPT, PAGES, 0, 70 - expected)]))
        meta = pickle.loads(pickle.dumps(meta))  # as the runtime broadcasts it
        before = halves.pool.clone()
        if number == 2:
            halves.pool[:4].zero_()
        halves.worker.bind_connector_meta(meta)
        halves.worker.start_load_kv(None)
        assert torch.equal(halves.pool, before)
        halves.worker.wait_for_save(None)
        finish = halves.scheduler.request_finished_by_layer_group if grouped else halves.scheduler.request_finished
        assert finish(request, [PAGES] if grouped else PAGES) is False
        assert halves.worker.transfers.drain(10)
    halves.agent.check_at_rest()


def test_trouble_is_counted_and_answered_with_a_safe_default(halves: Halves, caplog: pytest.LogCaptureFixture) -> None:
    halves.register()
    request = SimpleNamespace(request_id="not a number")
    for _ in range(3):
        assert halves.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        halves.scheduler.update_state_after_alloc(request, PAGES)
        halves.scheduler.update_state_after_alloc_by_layer_group(request, 5)
        halves.scheduler.cancel_load(request, 0, 1)
        assert halves.scheduler.request_finished(request, PAGES) is False
        assert halves.scheduler.request_finished_by_layer_group(request, [PAGES]) is False
        assert halves.scheduler.build_connector_meta(None) is None
        assert halves.worker.get_finished(None, [1]) == ([], [])
    assert halves.scheduler.troubles["get_num_new_matched_tokens.ValueError"] == 3
    assert caplog.text.count("get_num_new_matched_tokens") == 1 + caplog.text.count("in get_num_new_matched_tokens")


def test_a_promise_that_cannot_be_kept_stops_the_executor(halves: Halves) -> None:
    halves.register()
    halves.worker.bind_connector_meta(ConnectorMeta(loads=(Load(1, 9, 77, (0,), ((0,),)),)))
    with pytest.raises(PromiseBroken):
        halves.worker.start_load_kv(None)


def test_a_cache_registered_again_replaces_the_one_before(halves: Halves) -> None:
    halves.register()
    first = halves.worker.transfers
    halves.register()
    assert halves.worker.transfers is not first
    assert [client.closed for client in halves.agent.clients if hasattr(client, "closed")] == [True, False]


def test_an_engine_without_an_agent_serves_as_if_there_were_no_connector(halves: Halves) -> None:
    halves.agent.alive = False
    halves.register()
    request = FakeRequest(1, PROMPT)
    assert halves.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    meta = halves.scheduler.build_connector_meta(output([report(1, PROMPT, PAGES, 0, 70)]))
    halves.worker.bind_connector_meta(meta)
    halves.worker.wait_for_save(None)
    assert halves.worker.troubles.as_dict() == {"save_without_agent": 4}
