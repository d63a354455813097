"""Bring-up: what the runtime refuses, the interface's shapes, rank processes."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s3kv.sim import BringUpError, ConnectorConfig, Engine, ModelShape, SimConfig, SimRequest, install
from s3kv.sim.engine import main, run_job
from s3kv.sim.layout import KvCacheBufferRef, KvCacheRegion, valid_page_slots

TOY = ConnectorConfig("support.toy_connector", "ToyScheduler", "ToyWorker")
FLAT = ConnectorConfig("support.toy_connector", "FlatScheduler", "FlatWorker")
SMALL = ModelShape(num_layers=2, hidden=32, num_heads=2, num_kv_heads=1, mlp=32, windows=(None, 40))
FULL = ModelShape(num_layers=2, hidden=32, num_heads=2, num_kv_heads=1, mlp=32, windows=(None,))
PROMPT = tuple(random.Random(1).randrange(256) for _ in range(100))
Toy = Callable[..., None]


@pytest.fixture(autouse=True)
def fresh_toy() -> None:
    sys.modules.pop("support.toy_connector", None)


@pytest.mark.parametrize(
    ("connector", "changes", "message"),
    [
        (TOY, {"llm_args": {"kv_cache_config.host_cache_size": 1 << 30}}, "host_cache_size"),
        (TOY, {"llm_args": {"kv_cache_config.disk_cache_size": 1}}, "disk_cache_size"),
        (TOY, {"llm_args": {"speculative_config": object()}}, "speculative_config"),
        (TOY, {"llm_args": {"max_beam_width": 4}}, "max_beam_width"),
        (TOY, {"manager": "v1", "llm_args": {"scheduler_config.capacity_scheduler_policy": "MAX_UTILIZATION"}},
         "GUARANTEED_NO_EVICT"),
        (ConnectorConfig("support.toy_connector", "HalfScheduler", "ToyWorker"), {"model": FULL},
         "lacks update_state_after_alloc_by_layer_group"),
        (FLAT, {}, "update_state_after_alloc_by_layer_group and request_finished_by_layer_group"),
        (FLAT, {"model": FULL, "attention_dp": True, "tp_size": 2, "ranks": "thread"}, "supports_attention_dp"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("interface")
def test_the_runtime_refuses(connector: ConnectorConfig, changes: dict[str, Any], message: str, toy: Toy) -> None:
    with pytest.raises(BringUpError, match=message):
        Engine(SimConfig(**{"model": SMALL, **changes}), connector)


@pytest.mark.usefixtures("interface")
def test_a_flat_connector_runs_on_one_group_and_fails_on_two(toy: Toy) -> None:
    with Engine(SimConfig(model=FULL, padding_bytes=64), FLAT) as engine:
        assert engine.generate([SimRequest(1, PROMPT, 4)])[0].error is None
    scheduler_is_whole = ConnectorConfig("support.toy_connector", "ToyScheduler", "FlatWorker")
    with pytest.raises(NotImplementedError, match="2 layer group"):
        Engine(SimConfig(model=SMALL), scheduler_is_whole)


@pytest.mark.usefixtures("interface")
@pytest.mark.parametrize("scheduler_first", [True, False, None])
def test_the_leaders_halves_are_built_in_any_order_on_other_threads(
    scheduler_first: bool | None, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    toy_connector = importlib.import_module("support.toy_connector")

    order: list[tuple[str, threading.Thread]] = []
    for kind in ("ToyScheduler", "ToyWorker"):
        original = getattr(toy_connector, kind).__init__

        def init(self: Any, args: Any, original: Any = original, kind: str = kind) -> None:
            order.append((kind, threading.current_thread()))
            original(self, args)

        monkeypatch.setattr(getattr(toy_connector, kind), "__init__", init)
    Engine(SimConfig(model=SMALL, scheduler_first=scheduler_first), TOY).shutdown()
    names = [name for name, _ in order]
    if scheduler_first is not None:
        assert names == (["ToyScheduler", "ToyWorker"] if scheduler_first else ["ToyWorker", "ToyScheduler"])
    assert threading.main_thread() not in {thread for _, thread in order}


@pytest.mark.usefixtures("interface")
def test_llm_args_have_the_runtimes_names_and_can_be_wrong(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_connector = importlib.import_module("support.toy_connector")

    seen: list[Any] = []
    monkeypatch.setattr(toy_connector.ToyWorker, "_fail", lambda self, where: seen.append(self._llm_args))
    config = SimConfig(model=SMALL, llm_args={"kv_cache_config.tokens_per_block": 64, "pipeline_parallel_size": 2})
    Engine(config, TOY).shutdown()
    args = seen[0]
    assert (args.kv_cache_config.tokens_per_block, args.pipeline_parallel_size, args.tensor_parallel_size) == (64, 2, 1)
    assert args.kv_connector_config.connector_module == TOY.connector_module
    assert args.parallel_config.to_mapping().rank == 0


def test_install_gives_old_new_and_early_paths_and_goes_away() -> None:
    base = "tensorrt_llm._torch.pyexecutor."
    old, new = base + "kv_cache_connector", base + "connectors.kv_cache_connector"
    for paths, present, absent in (("old", old, new), ("new", new, old)):
        with install(paths):  # type: ignore[arg-type]
            module = importlib.import_module(present)
            assert hasattr(module.KvCacheConnectorWorker, "register_kv_cache_layout")
            with pytest.raises(ImportError):
                importlib.import_module(absent)
    with install("old", early=True):
        module = importlib.import_module(old)
        assert not hasattr(module.KvCacheConnectorWorker, "register_kv_cache_layout")
        assert not hasattr(module.RequestData(1, [], [], 0, 0), "cache_salt")
        with pytest.raises(ImportError):
            importlib.import_module(base + "connectors.kv_cache_layout")
    with pytest.raises(ImportError):
        importlib.import_module("tensorrt_llm")
    with pytest.raises(ValueError, match="early"), install("both", early=True):
        pass


@pytest.mark.parametrize(("paths", "early"), [("old", True), ("old", False), ("new", False)])
def test_a_connector_works_under_every_interface(paths: Any, early: bool, toy: Toy) -> None:
    with install(paths, early):
        for _ in range(2):
            with Engine(SimConfig(model=SMALL, manager="v1", guard=True), TOY) as engine:
                (result,) = engine.generate([SimRequest(1, PROMPT, 4, cache_salt="s")])
        if early:
            with pytest.raises(BringUpError, match="layer groups"):
                Engine(SimConfig(model=SMALL), TOY)
    sys.modules.pop("support.toy_connector")
    assert result.loaded_tokens == 96


def test_an_engine_refuses_a_connector_without_the_interface() -> None:
    with pytest.raises(BringUpError, match="install"):
        Engine(SimConfig(model=SMALL), TOY)


def test_a_region_checks_its_bounds() -> None:
    import torch

    memory = torch.arange(40, dtype=torch.uint8)
    region = KvCacheRegion(memory.data_ptr(), 4, 8, 5, (KvCacheBufferRef(0, "key"),))
    assert region.slot_tensor(2).tolist() == [16, 17, 18, 19]
    assert region.as_tensor()[-1].tolist() == [32, 33, 34, 35]
    assert region.address_of(1) == memory.data_ptr() + 8
    for slot in (-1, 5):
        with pytest.raises(IndexError):
            region.slot_tensor(slot)
    assert list(valid_page_slots([-1, 7, -1, 0])) == [(1, 7), (3, 0)]


@pytest.mark.slow
@pytest.mark.usefixtures("interface")
def test_rank_processes_serve_what_another_engines_ranks_stored(toy: Toy, tmp_path: Path) -> None:
    toy(store=f"{tmp_path}/", polls=1, hold=True)
    config = SimConfig(model=ModelShape(num_kv_heads=4), tp_size=4, chunk_tokens=32, overlap=True)
    outcomes = []
    for _ in range(2):
        with Engine(config, TOY) as engine:
            outcomes.append(engine.generate([SimRequest(1, PROMPT, 4), SimRequest(2, PROMPT[:50], 4)]))
    assert [result.loaded_tokens for result in outcomes[1]] == [96, 48]
    assert [result.tokens for result in outcomes[0]] == [result.tokens for result in outcomes[1]]


@pytest.mark.slow
@pytest.mark.usefixtures("interface")
@pytest.mark.parametrize("where", ["register", "get_finished", "meta"])
def test_a_rank_process_that_fails_ends_the_engine(where: str, toy: Toy, tmp_path: Path) -> None:
    toy(store=f"{tmp_path}/", bug=f"raise:{where}", rank=1)
    with pytest.raises(ValueError, match=f"asked to fail in {where}"):  # noqa: SIM117
        with Engine(SimConfig(model=ModelShape(), tp_size=2), TOY) as engine:
            engine.generate([SimRequest(1, PROMPT, 4)])


@pytest.mark.usefixtures("interface")
def test_attention_dp_ranks_share_what_either_stored(toy: Toy) -> None:
    config = SimConfig(model=SMALL, tp_size=2, attention_dp=True, ranks="thread", trace=True)
    with Engine(config, TOY) as engine:
        first = engine.generate([SimRequest(1, PROMPT, 4, dp_rank=0)])
        second = engine.generate([SimRequest(2, PROMPT, 4, dp_rank=1)])
        heard = {d.request_id for r in engine.trace(1) if r.name == "build_connector_meta"
                 for d in r.detail.new_requests}  # fmt: skip
    assert (first[0].loaded_tokens, second[0].loaded_tokens) == (0, 96)
    assert first[0].tokens == second[0].tokens
    assert heard == {2}


@pytest.mark.slow
def test_the_command_runs_a_job_in_a_process_of_its_own(tmp_path: Path, toy: Toy) -> None:
    toy(store=f"{tmp_path}/")
    job = {
        "config": {"model": {"num_layers": 2, "windows": [None, 40]}, "chunk_tokens": 32, "adapters": {"3": "x"}},
        "connector": vars(TOY),
        "requests": [{"request_id": 1, "prompt_tokens": list(PROMPT), "max_new_tokens": 3, "lora_task_id": 3}],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "s3kv.sim.engine", str(tmp_path / "job.json"), str(tmp_path / "result.json")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    (first,) = run_job(job)["results"]
    subprocess.run(command, check=True, env=environment)
    (second,) = json.loads((tmp_path / "result.json").read_text())["results"]
    assert (first["loaded_tokens"], second["loaded_tokens"]) == (0, 96)
    assert second["tokens"] == list(first["tokens"])


def test_a_job_that_fails_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").write_text('{"config": {"unknown": 1}, "requests": []}')
    assert main([str(tmp_path / "job.json"), str(tmp_path / "result.json")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "unknown" in line
