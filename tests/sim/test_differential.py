"""Every configuration gives the tokens of a run without a connector, and the scores to nine digits."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from s3kv.sim import ConnectorConfig, Engine, ModelShape, OfferPolicy, ReplayPolicy, SimConfig, SimResult
from s3kv.sim.workload import WorkloadShape, random_workload

TOY = ConnectorConfig("support.toy_connector", "ToyScheduler", "ToyWorker")
SMALL = ModelShape(num_layers=2, hidden=32, num_heads=2, num_kv_heads=1, mlp=32, windows=(None, 40))
FULL = ModelShape(num_layers=2, hidden=32, num_heads=2, num_kv_heads=1, mlp=32, windows=(None,))
ONE_WINDOW = ModelShape(num_layers=2, hidden=32, num_heads=2, num_kv_heads=1, mlp=32, windows=(40,))
REGIONS = ModelShape(
    num_layers=4, hidden=32, num_heads=2, num_kv_heads=1, mlp=32, windows=(None, 40), wide_layers=(0, 1),
    index_dim=8, block_scales=True,
)  # fmt: skip
LATENT = ModelShape(num_layers=2, hidden=32, num_heads=2, windows=(None,), mlp=32, latent_layers=(0, 1))
MIXED = ModelShape(num_layers=3, hidden=32, num_heads=2, num_kv_heads=1, mlp=32, windows=(None, 40), latent_layers=(2,))

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "v1": {"manager": "v1", "model": SMALL},
    "v1 chunked": {"manager": "v1", "model": SMALL, "chunk_tokens": 32},
    "v1 overlap": {"manager": "v1", "model": SMALL, "chunk_tokens": 32, "overlap": True},
    "v1 latent": {"manager": "v1", "model": LATENT, "overlap": True},
    "v1 fp8": {"manager": "v1", "model": SMALL, "kv_dtype": "float8_e4m3fn"},
    "v1 few pages": {"manager": "v1", "model": SMALL, "num_pages": 24},
    "v2 one group": {"model": FULL},
    "v2 one windowed group": {"model": ONE_WINDOW, "chunk_tokens": 32, "overlap": True},
    "v2 groups": {"model": SMALL},
    "v2 groups chunked": {"model": SMALL, "chunk_tokens": 32},
    "v2 groups overlap": {"model": SMALL, "chunk_tokens": 48, "overlap": True, "padding_bytes": 128},
    "v2 regions": {"model": REGIONS, "chunk_tokens": 32, "replicated": "used"},
    "v2 regions, none replicated": {"model": REGIONS, "overlap": True, "replicated": "absent"},
    "v2 latent": {"model": LATENT, "replicated": "empty"},
    "v2 mixed": {"model": MIXED, "chunk_tokens": 32, "replicated": "used"},
    "v2 no partial reuse": {"model": SMALL, "partial_reuse": False},
    "v2 no reuse": {"model": SMALL, "reuse": False},
    "v2 few pages": {"model": SMALL, "chunk_tokens": 32, "num_pages": 24, "overlap": True},
    "v2 replays": {"model": SMALL, "chunk_tokens": 32, "overlap": True, "replays": ReplayPolicy(0.1)},
    "v2 offers in part": {"model": SMALL, "chunk_tokens": 32, "offers": OfferPolicy("random", ragged=True)},
    "v2 late match": {"model": SMALL, "offers": OfferPolicy("random", late_match=True)},
    "v2 no hooks": {"model": SMALL, "layer_hooks": "never", "kv_dtype": "bfloat16", "dummies": 3},
    "v2 fp8": {"model": SMALL, "kv_dtype": "float8_e4m3fn", "chunk_tokens": 32, "overlap": True},
    "v2 garbage": {"model": SMALL, "poison": "garbage", "load_on_empty": True, "scheduler_first": True},
    "v2 threads": {"model": ModelShape(num_layers=2, hidden=32, mlp=32, windows=(None, 40), index_dim=4),
                   "tp_size": 2, "ranks": "thread", "chunk_tokens": 32},
    "v2 attention dp": {"model": SMALL, "tp_size": 2, "attention_dp": True, "ranks": "thread"},
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("interface")


def same(first: list[SimResult], second: list[SimResult]) -> None:
    assert [result.tokens for result in first] == [result.tokens for result in second]
    for one, other in zip(first, second, strict=True):
        assert one.top_scores == pytest.approx(other.top_scores, abs=1e-9)


HELD = [(name, "hold") for name in ("v1 overlap", "v2 groups overlap", "v2 few pages", "v2 threads")]


@pytest.mark.parametrize(
    ("name", "load"), [(name, load) for name in CONFIGURATIONS for load in ("sync", "async")] + HELD
)
def test_tokens_are_those_of_a_run_without_a_connector(name: str, load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workload is served twice with one store, by two engines: what the first computed, the second loads."""
    settings = {"store": f"{name} {load}", "load": load.replace("hold", "sync"), "hold": load == "hold", "polls": 2}
    monkeypatch.setenv("TOY", json.dumps(settings))
    config = SimConfig(guard=True, **{"num_pages": 96, **CONFIGURATIONS[name]})
    shape = WorkloadShape(requests=6, max_prompt=120, max_new_tokens=20, boundaries=(16, 32), salts=1, adapters=1)
    workload = random_workload(random.Random(name), shape)
    with Engine(SimConfig(model=config.model, manager=config.manager, kv_dtype=config.kv_dtype, reuse=False)) as plain:
        expected = plain.generate(workload)
    for _run in range(2):
        with Engine(config, TOY) as engine:
            results = engine.generate(workload)
            same(results, expected)
            assert not any(result.error for result in results)
            for executor in engine.executors:
                executor.check_clean()
                if executor.driver.scheduler is not None:
                    assert not executor.driver.scheduler.states
    if config.reuse:
        assert sum(result.loaded_tokens for result in results) > 0
