"""What the runtime does in each step of the contract, and that it stops a connector which breaks it."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from s3kv.sim import ConnectorConfig, ContractError, Engine, Media, ModelShape, OfferPolicy, SimConfig, SimRequest
from s3kv.sim.llm_request import LlmRequest

pytestmark = pytest.mark.usefixtures("interface")

TOY = ConnectorConfig("support.toy_connector", "ToyScheduler", "ToyWorker")
SMALL = ModelShape(num_layers=2, hidden=32, num_heads=2, num_kv_heads=1, mlp=32, windows=(None, 40))
PROMPT = tuple(random.Random(1).randrange(256) for _ in range(260))
Toy = Callable[..., None]


def calls(engine: Engine, name: str) -> list[Any]:
    return [record.detail for record in engine.trace() if record.name == name]


def reports(engine: Engine) -> list[tuple[str, int, int, int, int]]:
    """Of every report of request 1: new or cached, tokens, blocks, position, scheduled."""
    rows = []
    for record in engine.trace():
        if record.name == "build_connector_meta":
            for kind in ("new", "cached"):
                rows += [
                    (kind, len(d.new_tokens), len(d.new_block_ids), d.computed_position, d.num_scheduled_tokens)
                    for d in getattr(record.detail, f"{kind}_requests")
                ]
    return rows


def test_worked_example_of_a_prompt_of_48_tokens(toy: Toy) -> None:
    with Engine(SimConfig(model=SMALL, manager="v1", tokens_per_block=32, trace=True), TOY) as engine:
        engine.generate([SimRequest(1, PROMPT[:48], 32)])
        rows = reports(engine)
    assert rows[0] == ("new", 48, 2, 0, 48)
    assert rows[1:] == [("cached", 1, 1 if at % 32 == 0 else 0, at, 1) for at in range(48, 79)]


def test_worked_example_of_chunks_under_v1_and_v2(toy: Toy) -> None:
    toy(load="none")
    expected = {"v1": [("new", 256, 8, 0, 128), ("cached", 0, 0, 128, 128)],
                "v2": [("new", 256, 4, 0, 128), ("cached", 0, 4, 128, 128)]}  # fmt: skip
    for manager, rows in expected.items():
        model = ModelShape(num_layers=1, hidden=32, windows=(None,), mlp=32)
        config = SimConfig(model=model, manager=manager, tokens_per_block=32, chunk_tokens=128, trace=True)  # type: ignore[arg-type]
        with Engine(config, TOY) as engine:
            engine.generate([SimRequest(1, PROMPT[:256], 1)])
            assert reports(engine) == rows


def test_overlap_reports_lag_and_one_token_more_is_computed(toy: Toy) -> None:
    with Engine(SimConfig(model=SMALL, manager="v1", tokens_per_block=32, overlap=True, trace=True), TOY) as engine:
        (result,) = engine.generate([SimRequest(1, PROMPT[:48], 3)])
        rows = reports(engine)
    assert len(result.tokens) == 3
    assert rows == [("new", 48, 2, 0, 48), ("cached", 0, 0, 47, 1), ("cached", 1, 0, 48, 1), ("cached", 1, 0, 49, 1)]


def test_steps_come_in_the_contracts_order(toy: Toy) -> None:
    with Engine(SimConfig(model=SMALL, trace=True), TOY) as engine:
        engine.generate([SimRequest(1, PROMPT[:40], 1)])
        names = [record.name for record in engine.trace()]
    assert names == [
        "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "start_load_kv",
        "wait_for_save", "request_finished", "get_finished",
    ]  # fmt: skip


def test_windowed_pages_read_minus_one_in_place(toy: Toy) -> None:
    with Engine(SimConfig(model=SMALL, trace=True), TOY) as engine:
        engine.generate([SimRequest(1, PROMPT[:100], 8)])
        finished = calls(engine, "request_finished")[0][1]
    # 107 tokens are computed; the query at 107 looks back to 68, which lies in block 4.
    assert [len(pages) for pages in finished] == [7, 7]
    assert -1 not in finished[0]
    assert [page < 0 for page in finished[1]] == [True] * 4 + [False] * 3


def test_an_offer_leaves_passed_blocks_without_pages(toy: Toy) -> None:
    config = SimConfig(model=SMALL, trace=True, reuse=True)
    for _ in range(2):
        with Engine(config, TOY) as engine:
            (result,) = engine.generate([SimRequest(1, PROMPT, 1)])
            pages = calls(engine, "update_state_after_alloc")[0][1]
    assert result.loaded_tokens == 256
    assert [page < 0 for page in pages[1]] == [True] * 13 + [False] * 4


def test_an_async_load_is_left_out_until_every_rank_is_done(toy: Toy) -> None:
    model = ModelShape(num_layers=1, hidden=32, mlp=32)
    config = SimConfig(model=model, trace=True, tp_size=2, ranks="thread")
    toy(polls=3)
    with Engine(config, TOY) as engine:
        engine.generate([SimRequest(1, PROMPT, 1)])
    toy(polls=3, load="async")
    with Engine(config, TOY) as engine:
        (result,) = engine.generate([SimRequest(1, PROMPT, 1)])
        records = engine.trace()
    outputs = [record.detail for record in records if record.name == "build_connector_meta"]
    reported = [output.new_requests + output.cached_requests for output in outputs]
    assert result.loaded_tokens == 256
    # Rank 1 is done at its seventh poll; the report comes in the iteration after.
    assert [len(requests) for requests in reported] == [0] * 7 + [1]
    assert (reported[-1][0].computed_position, reported[-1][0].num_scheduled_tokens) == (256, 4)
    assert [record.name for record in records].count("start_load_kv") == 1


def test_v1_shows_a_request_without_pythons_fields(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_connector = importlib.import_module("support.toy_connector")

    seen: list[Any] = []

    def query(self: Any, request: Any, computed: int) -> tuple[int, bool]:
        seen.append((request, request.get_tokens(0)))
        return 0, False

    monkeypatch.setattr(toy_connector.ToyScheduler, "get_num_new_matched_tokens", query)
    for manager in ("v1", "v2"):
        with Engine(SimConfig(model=SMALL, manager=manager), TOY) as engine:  # type: ignore[arg-type]
            engine.generate([SimRequest(1, PROMPT[:20], 1)])
    assert [hasattr(request, "py_request_id") for request, _ in seen] == [False, True]
    assert [tokens for _, tokens in seen] == [list(PROMPT[:20])] * 2


def test_priorities_hashes_and_salts_are_reported_as_each_manager_does(toy: Toy) -> None:
    for manager, priorities, hashes in (("v1", [35, 35, 35], 2), ("v2", None, 0)):
        with Engine(SimConfig(model=SMALL, manager=manager, trace=True), TOY) as engine:  # type: ignore[arg-type]
            engine.generate([SimRequest(1, PROMPT[:40], 1, cache_salt="s", priority=35)])
            data = calls(engine, "build_connector_meta")[0].new_requests[0]
        assert (data.priorities, len(data.block_hashes), data.cache_salt) == (priorities, hashes, "s")
        assert data.new_block_ids_by_layer_group == [] if manager == "v1" else data.new_block_ids == []


@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_cancelling_at_any_step_leaves_nothing_behind(manager: str, load: str, step: int, toy: Toy) -> None:
    config = SimConfig(model=SMALL, manager=manager, chunk_tokens=64, overlap=step % 2 == 0, guard=True)  # type: ignore[arg-type]
    toy(load=load, polls=2, hold=step % 3 == 0)
    with Engine(config, TOY) as engine:
        engine.generate([SimRequest(1, PROMPT[:200], 2)])
    with Engine(config, TOY) as engine:
        results = engine.generate([SimRequest(1, PROMPT, 12, cancel_after=step), SimRequest(2, PROMPT[:90], 12)])
        executor = engine.executors[0]
        executor.check_clean()
        assert executor.idle
        assert not executor.driver.scheduler.states  # type: ignore[union-attr]
    assert (results[0].error, results[1].error) == ("cancelled", None)
    assert len(results[1].tokens) == 12


@pytest.mark.parametrize(
    ("bug", "error", "message"),
    [
        ("zero_async", ContractError, r"\(0, True\)"),
        ("offer_all", ContractError, "leave none of"),
        ("negative", ContractError, "offered -16"),
        ("not_tuple", ContractError, "answered 0"),
        ("not_int", ContractError, r"\(int, bool\)"),
        ("unknown_id", KeyError, "12345"),
        ("named_twice", KeyError, "1"),
        ("not_bool", ContractError, "not a bool"),
        ("unpicklable", Exception, "pickle"),
        ("never_done", ContractError, "never reported complete"),
        ("stray_write", ContractError, "by no offer"),
        ("raise:query", ValueError, "asked to fail in query"),
        ("raise:alloc", ValueError, "asked to fail in alloc"),
        ("raise:meta", ValueError, "asked to fail in meta"),
        ("raise:bind", ValueError, "asked to fail in bind"),
        ("raise:start_load", ValueError, "asked to fail in start_load"),
        ("raise:before_layer", ValueError, "asked to fail in before_layer"),
        ("raise:after_layer", ValueError, "asked to fail in after_layer"),
        ("raise:wait_for_save", ValueError, "asked to fail in wait_for_save"),
        ("raise:get_finished", ValueError, "asked to fail in get_finished"),
        ("raise:finished", ValueError, "asked to fail in finished"),
    ],
)
def test_a_broken_contract_stops_the_engine(bug: str, error: type[Exception], message: str, toy: Toy) -> None:
    toy(bug=bug, hold=True)
    config = SimConfig(model=SMALL, guard=True, stall_limit=50)
    with Engine(config, TOY, idle=lambda: None) as engine, pytest.raises(error, match=message):
        engine.generate([SimRequest(1, PROMPT[:64], 4), SimRequest(2, PROMPT, 8)])


@pytest.mark.parametrize(
    ("bug", "message"),
    [("skip_load", "promised"), ("offer_unverified", "promised"), ("ignore_minus_one", "by no offer")],
)
def test_the_guard_finds_promised_pages_unwritten_and_other_pages_written(bug: str, message: str, toy: Toy) -> None:
    if bug != "offer_unverified":
        with Engine(SimConfig(model=SMALL), TOY) as engine:
            engine.generate([SimRequest(1, PROMPT, 4)])
    toy(bug=bug)
    with Engine(SimConfig(model=SMALL, guard=True), TOY) as engine, pytest.raises(ContractError, match=message):
        engine.generate([SimRequest(1, PROMPT, 4)])


@pytest.mark.parametrize(
    ("bug", "changes"),
    [
        ("early_save", {"chunk_tokens": 64, "manager": "v1"}),
        ("offer_unverified", {}),
        ("skip_load", {}),
        ("no_group", {}),
        ("no_salt", {}),
        ("no_adapter", {}),
    ],
)
def test_a_wrong_connector_gives_wrong_tokens(bug: str, changes: dict[str, Any], toy: Toy) -> None:
    """The differential test bites: each fault shows against a run without a connector."""
    config = SimConfig(**{"model": SMALL, "num_pages": 64, **changes})
    requests = [SimRequest(1, PROMPT, 4, cache_salt="a", cancel_after=1 if bug == "early_save" else None),
                SimRequest(2, PROMPT, 6, cache_salt="a"), SimRequest(3, PROMPT, 6, cache_salt="b"),
                SimRequest(4, PROMPT, 6, lora_task_id=1), SimRequest(5, PROMPT, 6, lora_task_id=2)]  # fmt: skip
    with Engine(SimConfig(model=SMALL)) as plain:
        expected = plain.generate(requests)
    outcomes = []
    for run in range(2):
        toy(bug="" if bug == "skip_load" and run == 0 else bug)
        with Engine(config, TOY) as engine:
            outcomes += engine.generate(requests, sequential=True)
    right = {result.request_id: result.top_scores for result in expected}
    wrong = [r for r in outcomes if not r.error and r.top_scores != pytest.approx(right[r.request_id], abs=1e-6)]
    assert wrong


def test_dummies_and_media_without_digests_are_shown_as_such(toy: Toy) -> None:
    media = (Media(10, 30, "a cat"),)
    requests = [SimRequest(i, PROMPT, 4, media=media, media_hashes=i % 2 == 0) for i in range(4)]
    for _ in range(2):
        with Engine(SimConfig(model=SMALL, dummies=2, guard=True), TOY) as engine:
            results = engine.generate(requests, sequential=True)
            engine.executors[0].check_clean()
    assert [result.loaded_tokens for result in results] == [256, 0, 0, 0]
    assert [result.reused_tokens for result in results] == [0, 0, 256, 0]
    assert len({result.tokens for result in results}) == 1


def test_raw_media_stay_with_python_and_native_code_has_their_hashes() -> None:
    media = Media(1, 2, "a cat")
    plain, raw, hashed = (
        LlmRequest(1, PROMPT, 1, tokens_per_block=16, media=each) for each in ([], [(media, False)], [(media, True)])
    )
    assert plain.py_multimodal_data is None
    assert raw.py_multimodal_data == hashed.py_multimodal_data == {"image": ["a cat"]}
    native = [request.bound_view(early=False) for request in (plain, raw, hashed)]
    assert not any(hasattr(view, "py_multimodal_data") for view in native)
    names = ("multimodal_hashes", "multimodal_positions", "multimodal_lengths", "multimodal_embedding")
    seen = [[getattr(view, name) for name in names] for view in native]
    assert seen[0] == seen[1] == [None] * 4
    assert seen[2][1:] == [[1], [2], None] and len(seen[2][0][0]) == 8


def test_honouring_nothing_computes_everything(toy: Toy) -> None:
    for load in ("sync", "async"):
        toy(load=load)
        for _ in range(2):
            with Engine(SimConfig(model=SMALL, offers=OfferPolicy("none"), guard=True), TOY) as engine:
                (result,) = engine.generate([SimRequest(1, PROMPT, 4)])
        assert (result.loaded_tokens, result.computed_tokens) == (0, 260)
