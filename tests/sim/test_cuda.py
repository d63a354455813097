"""The runtime on a CUDA device: the CPU's tokens, and no waiting for the device but for what was sampled."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from s3kv.sim import ConnectorConfig, Engine, ModelShape, OfferPolicy, SimConfig
from s3kv.sim.workload import WorkloadShape, random_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("interface"),
]

TOY = ConnectorConfig("support.toy_connector", "ToyScheduler", "ToyWorker")
SHAPE = ModelShape(windows=(None, 40), wide_layers=(0,), index_dim=8, block_scales=True)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Operations that wait for the device raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize(
    "changes",
    [
        {"manager": "v1", "model": ModelShape()},
        {"chunk_tokens": 32, "overlap": True},
        {"kv_dtype": "bfloat16", "layer_hooks": "never", "offers": OfferPolicy("random")},
    ],
)
def test_a_device_gives_the_cpus_tokens(changes: dict[str, Any], load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY", json.dumps({"store": f"{changes} {load}", "load": load, "polls": 2}))
    config = SimConfig(**{"model": SHAPE, "device": "cuda", "guard": True, "num_pages": 64, **changes})
    workload = random_workload(random.Random(3), WorkloadShape(requests=6, max_new_tokens=12))
    with Engine(SimConfig(model=config.model, kv_dtype=config.kv_dtype, reuse=False)) as plain:
        expected = [result.tokens for result in plain.generate(workload)]
    for _ in range(2):
        with Engine(config, TOY) as engine:
            results = engine.generate(workload)
            assert [result.tokens for result in results] == expected
    assert sum(result.loaded_tokens for result in results) > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_passes_do_not_wait_for_the_device(overlap: bool) -> None:
    workload = random_workload(random.Random(4), WorkloadShape(requests=6, max_new_tokens=12, salts=1, adapters=1))
    config = SimConfig(model=SHAPE, device="cuda", num_pages=48, chunk_tokens=32, overlap=overlap)
    with Engine(config) as engine, no_waiting():
        assert not any(result.error for result in engine.generate(workload))
