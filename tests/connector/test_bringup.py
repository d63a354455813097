"""Start-up: what is refused, what is warned of, and where the identity of a cache comes from."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from support.connector_rig import ALONE, CONNECTOR, pages_cache, use_agent
from support.fake_agent import FakeAgent

from s3kv.connector.bases import base_classes
from s3kv.connector.bringup import Placement, check_arguments, placement
from s3kv.connector.layout import from_tensor
from s3kv.connector.namespace import model_folder, namespace_of
from s3kv.connector.worker import rank_engine_id
from s3kv.errors import ConfigError
from s3kv.identity import NamespaceSpec
from s3kv.settings import IdentitySettings
from s3kv.sim import Engine, ModelShape, SimConfig, SimRequest, install
from s3kv.sim.llm_args import make_llm_args

IDENTITY = IdentitySettings(fingerprint="weights")


def arguments(**overrides: Any) -> SimpleNamespace:
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    return make_llm_args(SimConfig(llm_args=names), CONNECTOR, 0)


REFUSED = {
    "host tier": ({"kv_cache_config__host_cache_size": 1 << 30}, "kv_cache_config.host_cache_size"),
    "disk tier": ({"kv_cache_config__disk_cache_size": 1}, "kv_cache_config.disk_cache_size"),
    "pipeline": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    "context": ({"context_parallel_size": 2}, "context_parallel_size"),
    "beams": ({"max_beam_width": 4}, "max_beam_width"),
    "speculation": ({"speculative_config": object()}, "speculative_config"),
    "policy": (
        {
            "scheduler_config__capacity_scheduler_policy": "MAX_UTILIZATION",
            "kv_cache_config__use_kv_cache_manager_v2": False,
        },
        "scheduler_config.capacity_scheduler_policy",
    ),
    "nodes": ({"tensor_parallel_size": 16}, "tensor_parallel_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_case_01_what_cannot_be_served_is_refused_before_any_network_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both halves refuse, in one sentence that names the setting, and no socket was made."""
    changes, setting = REFUSED[name]
    args = arguments(**changes)
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a socket was made"))
    with install():
        from s3kv.connector import S3KVScheduler, S3KVWorker

        for half in (S3KVScheduler, S3KVWorker):
            with pytest.raises(ConfigError) as error:
                half(args)
            text = str(error.value)
            assert setting in text and "\n" not in text and text.count(". ") == 0


def test_a_plain_configuration_is_served_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    check_arguments(arguments())
    check_arguments(SimpleNamespace())  # a release with none of these settings
    check_arguments(arguments(scheduler_config__capacity_scheduler_policy=SimpleNamespace(value="GUARANTEED_NO_EVICT")))
    assert caplog.text == ""


def test_v2_replays_are_reported_so_its_policy_is_its_own() -> None:
    check_arguments(arguments(scheduler_config__capacity_scheduler_policy="MAX_UTILIZATION"))


def test_no_block_reuse_is_warned_of_and_nothing_is_offered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent()
    use_agent(monkeypatch, agent)
    config = SimConfig(reuse=False)
    with install(), Engine(config, CONNECTOR) as engine:
        engine.generate([SimRequest(1, tuple(range(60))), SimRequest(2, tuple(range(60)))], sequential=True)
        assert engine.executors[0].driver.worker.transfers.drain(10)
    assert "enable_block_reuse" in caplog.text
    assert agent.clients[0].matches == 0
    assert len(agent.blocks_saved()) >= 3


def test_case_02_the_registered_layout_decides_the_block_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """V2: the arguments say 32 and the cache has 64; 64 it is."""
    agent = FakeAgent()
    use_agent(monkeypatch, agent)
    config = SimConfig(tokens_per_block=64, llm_args={"kv_cache_config.tokens_per_block": 32}, guard=True)
    with install(), Engine(config, CONNECTOR) as engine:
        engine.generate([SimRequest(1, tuple(range(200)))])
        assert engine.executors[0].driver.worker.transfers.drain(10)
    assert agent.clients[0].namespace.tokens_per_block == 64
    assert len(agent.blocks_saved()) == 3
    assert "tokens_per_block" in caplog.text


def test_case_02_a_v1_tensor_that_contradicts_the_block_size_stores_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = FakeAgent()
    use_agent(monkeypatch, agent)
    config = SimConfig(
        manager="v1", tokens_per_block=64, model=ModelShape(windows=(None,)),
        llm_args={"kv_cache_config.tokens_per_block": 32},
    )  # fmt: skip
    with install(), Engine(config, CONNECTOR) as engine:
        engine.generate([SimRequest(1, tuple(range(200))), SimRequest(2, tuple(range(30)), max_new_tokens=40)])
        assert engine.executors[0].driver.worker.transfers.drain(10)
    assert agent.blocks_saved() == {}
    assert "kv_cache_config.tokens_per_block" in caplog.text


def test_unknown_weights_are_refused_and_the_setting_named() -> None:
    cache, _ = pages_cache()
    with pytest.raises(ConfigError, match=r"identity\.fingerprint"):
        namespace_of(SimpleNamespace(model="org/model"), IdentitySettings(), cache, ALONE)


def test_checkpoints_are_found_in_a_folder_or_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    repository = tmp_path / "hub" / "models--org--model"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert model_folder(SimpleNamespace(model="org/model")) == snapshot
    assert model_folder(SimpleNamespace(model="org/model", revision="abc")) == snapshot
    assert model_folder(SimpleNamespace(model="org/other")) is None
    assert model_folder(SimpleNamespace(model=str(snapshot))) == snapshot
    assert model_folder(SimpleNamespace()) is None


def test_one_checkpoint_in_two_places_is_one_namespace(tmp_path: Path) -> None:
    cache, _ = pages_cache()
    digests = set()
    for place in ("one", "two"):
        folder = tmp_path / place / "llama"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
        digests.add(namespace_of(SimpleNamespace(model=str(folder)), IdentitySettings(), cache, ALONE).digest)
    assert len(digests) == 1


def test_case_12_names_that_look_alike_are_different_namespaces() -> None:
    cache, _ = pages_cache()
    names = [namespace_of(SimpleNamespace(model=model), IDENTITY, cache, ALONE).digest for model in ("a/b_c", "a_b/c")]
    assert names[0] != names[1]


CHANGES: dict[str, dict[str, Any]] = {
    "weights": {"settings": IdentitySettings(fingerprint="other")},
    "extra": {"settings": IdentitySettings(fingerprint="weights", extra={"rope": "yarn"})},
    "ranks": {"place": Placement(0, 2, False, 0)},
    "backend": {"args": {"attn_backend": "FLASHINFER"}},
    "made-up weights": {"args": {"load_format": "dummy"}},
    "model overrides": {"args": {"model_kwargs": {"rope_theta": 5}}},
    "sparse attention": {"args": {"sparse_attention_config": SimpleNamespace(algorithm="rocket")}},
    "sinks": {"args": {"kv_cache_config": SimpleNamespace(sink_token_length=4)}},
    "type of computing": {"args": {"dtype": "float16"}},
    "scales of quantization": {"args": {"force_dynamic_quantization": True}},
    "lossy reduction": {"args": {"allreduce_strategy": "LOWPRECISION"}},
    "lossy experts": {"args": {"moe_config": SimpleNamespace(use_low_precision_moe_combine=True)}},
    "spared modules": {"args": {"quant_config": SimpleNamespace(exclude_modules=["*.k_proj"])}},
    "quantization": {"args": {"quant_config": SimpleNamespace(quant_algo="FP8", kv_cache_quant_algo=None)}},
    "kv quantization": {"args": {"quant_config": SimpleNamespace(quant_algo=None, kv_cache_quant_algo="FP8")}},
    "block size": {"cache": pages_cache(tokens_per_block=8)[0]},
    "groups": {"cache": pages_cache(groups=2)[0]},
    "page size": {"cache": pages_cache(size=128)[0]},
}


@pytest.mark.parametrize("name", CHANGES)
def test_case_14_whatever_changes_the_bytes_changes_the_namespace(name: str) -> None:
    change = CHANGES[name]
    base = namespace_of(SimpleNamespace(model="m"), IDENTITY, pages_cache()[0], ALONE)
    other = namespace_of(
        SimpleNamespace(model="m", **change.get("args", {})),
        change.get("settings", IDENTITY),
        change.get("cache") or pages_cache()[0],
        change.get("place", ALONE),
    )
    assert base.digest != other.digest


def v1_namespace(window: Any, **arguments: Any) -> NamespaceSpec:
    """Of V1's tensor, which tells neither block size nor windows; four layers."""
    cache = from_tensor(torch.zeros(8, 4, 2, 64, dtype=torch.bfloat16))
    config = SimpleNamespace(tokens_per_block=32, max_attention_window=window)
    return namespace_of(SimpleNamespace(model="m", kv_cache_config=config, **arguments), IDENTITY, cache, ALONE)


def test_v1_windows_are_part_of_the_namespace_by_layer() -> None:
    full, narrow, wide = v1_namespace(None), v1_namespace([1024]), v1_namespace([4096])
    assert len({full.digest, narrow.digest, wide.digest, v1_namespace([1024, 4096]).digest}) == 4
    assert v1_namespace([1024, 1024]) == v1_namespace((1024,)) == v1_namespace(1024) == narrow
    assert v1_namespace([1024, 4096] * 2) == v1_namespace([1024, 4096])
    assert NamespaceSpec.from_json(narrow.to_json()) == narrow


def test_v2_windows_are_the_layouts_alone() -> None:
    args = SimpleNamespace(model="m", kv_cache_config=SimpleNamespace(max_attention_window=[1024]))
    base = namespace_of(SimpleNamespace(model="m"), IDENTITY, pages_cache()[0], ALONE)
    assert namespace_of(args, IDENTITY, pages_cache()[0], ALONE) == base


def test_arguments_that_change_nothing_leave_the_namespace_alone(tmp_path: Path) -> None:
    """What releases without them get, so that an upgrade and a setting at its default find what is stored."""
    defaults = {
        "dtype": "auto", "sparse_attention_config": None, "force_dynamic_quantization": False, "model_kwargs": None,
        "allreduce_strategy": "AUTO", "load_format": "auto", "video_pruning_rate": None,
        "moe_config": SimpleNamespace(use_low_precision_moe_combine=False),
    }  # fmt: skip
    assert v1_namespace(None, **defaults) == v1_namespace(None)
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "quantization_config": {}}))
    cache, quantized = pages_cache()[0], SimpleNamespace(exclude_modules=["lm_head"])
    plain, stated = (
        namespace_of(SimpleNamespace(model=str(tmp_path), **arguments), IDENTITY, cache, ALONE)
        for arguments in ({}, {"dtype": "bf16", "quant_config": quantized})
    )
    assert plain == stated  # the checkpoint says so itself


def test_settings_models_are_told_apart_by_their_fields() -> None:
    class Sparse(BaseModel):
        budget: int

    def named(budget: int) -> NamespaceSpec:
        return v1_namespace(None, sparse_attention_config=Sparse(budget=budget))

    assert named(1) == named(1) != named(2)


def test_a_user_without_a_home_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with pytest.raises(ConfigError, match=r"identity\.fingerprint"):
        namespace_of(SimpleNamespace(model="some/model"), IdentitySettings(), pages_cache()[0], ALONE)
    assert namespace_of(SimpleNamespace(model="some/model"), IDENTITY, pages_cache()[0], ALONE).model == "some/model"


def test_attention_dp_counts_as_unsharded() -> None:
    args = arguments(tensor_parallel_size=4, enable_attention_dp=True)
    environment = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    place = placement(args, environment)
    assert (place.rank, place.ranks, place.process_rank, place.leads) == (0, 1, 3, True)
    cache, _ = pages_cache()
    assert namespace_of(args, IDENTITY, cache, place).shards == 1


def test_rank_comes_from_the_launcher_and_nodes_are_counted() -> None:
    args = arguments(tensor_parallel_size=2)
    assert placement(args, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}) == Placement(1, 2, False, 1)
    assert placement(arguments(), {"SLURM_PROCID": "5"}).rank == 0
    with pytest.raises(ConfigError, match="one node"):
        placement(args, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})


def test_ranks_of_one_engine_share_an_id_and_engines_of_one_process_do_not() -> None:
    from s3kv.connector.meeting import Room

    assert rank_engine_id(None, 2) == rank_engine_id(Room(), 2)
    assert rank_engine_id(Room(), 1) != rank_engine_id(Room(), 1)


def test_case_18_a_cache_without_values_is_one_replicated_part() -> None:
    cache = from_tensor(torch.zeros(8, 3, 1, 64, dtype=torch.bfloat16), None)
    args = SimpleNamespace(model="m", kv_cache_config=SimpleNamespace(tokens_per_block=32))
    two = namespace_of(args, IDENTITY, cache, Placement(1, 2, False, 1))
    one = namespace_of(args, IDENTITY, cache, ALONE)
    assert (two.shards, two.digest) == (1, one.digest)
    assert [part.shard for part in two.parts] == [255]


class TestImport:
    def test_without_the_runtime_the_error_is_one_clear_sentence(self) -> None:
        import s3kv.connector

        with pytest.raises(ImportError, match=r"needs TensorRT-LLM 1\.0 or later"):
            _ = s3kv.connector.S3KVWorker
        with pytest.raises(AttributeError):
            _ = s3kv.connector.nothing_of_the_kind  # type: ignore[attr-defined]

    @pytest.mark.parametrize(("paths", "early"), [("old", True), ("old", False), ("new", False), ("both", False)])
    def test_both_module_paths_serve(self, paths: Any, early: bool) -> None:
        with install(paths, early):
            import s3kv.connector

            scheduler_base, worker_base = base_classes()
            assert issubclass(s3kv.connector.S3KVScheduler, scheduler_base)
            assert issubclass(s3kv.connector.S3KVWorker, worker_base)
            assert s3kv.connector.S3KVWorker is s3kv.connector.S3KVWorker
            assert s3kv.connector.S3KVWorker.supports_attention_dp is True
            assert s3kv.connector.S3KVScheduler.supports_attention_dp is True

    def test_a_release_that_fails_inside_says_its_own_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import importlib

        def broken(path: str) -> Any:
            raise ImportError("libcudart.so.99: cannot open shared object file")

        monkeypatch.setattr(importlib, "import_module", broken)
        with pytest.raises(ImportError, match=r"libcudart\.so\.99"):
            base_classes()

    def test_case_34_importing_leaves_cuda_alone(self) -> None:
        code = (
            "import sys; from s3kv.sim.install import install\n"
            "with install():\n"
            "    import s3kv.connector; s3kv.connector.S3KVScheduler, s3kv.connector.S3KVWorker\n"
            "import torch; assert not torch.cuda.is_initialized()\n"
            "assert 's3kv.store' not in sys.modules and 's3kv.catalog' not in sys.modules\n"
            "assert 's3kv.agent' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
