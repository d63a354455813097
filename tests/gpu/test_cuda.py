"""The differential tests on a CUDA device: freed pages poisoned and reused at once, copies delayed artificially."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.agents import agent_settings, running_agent

from s3kv.connector.cuda import CudaDevice
from s3kv.settings import CONFIG_VARIABLE
from s3kv.sim import ConnectorConfig, Engine, SimConfig, SimRequest, SimResult, install
from s3kv.sim.demo import CONNECTOR, write_settings
from s3kv.sim.shape import ModelShape
from s3kv.sim.workload import WorkloadShape, random_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("library", [True, False], ids=["library", "kernel"])
def test_kernels_run_after_a_failed_registration(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """library: whether the runtime that torch calls is found; otherwise a kernel takes the error."""
    device = CudaDevice(torch.device("cuda", 0))
    device.adopt()
    if not library:
        load = ctypes.CDLL

        def missing(path: Any, *arguments: Any, **more: Any) -> Any:
            if path is not None and path.endswith("libc10_cuda.so"):
                raise OSError(path)
            return load(path, *arguments, **more)

        monkeypatch.setattr(ctypes, "CDLL", missing)
    unmapped = 4096
    assert "cudaHostRegister" in (device.pin(unmapped, 4096) or "")
    assert torch.ones(8, device="cuda").sum().item() == 8
    device.unpin(unmapped)
    assert torch.ones(8, device="cuda").sum().item() == 8


SLOW = {
    "connector_module": "support.slow_cuda",
    "connector_scheduler_class": "SlowScheduler",
    "connector_worker_class": "SlowWorker",
}
FULL, WINDOWED, MIXED = (None,), (64,), (None, 64)


def config(**changes: Any) -> SimConfig:
    windows = changes.pop("windows", MIXED)
    model = ModelShape(windows=windows, **changes.pop("shape", {}))
    values: dict[str, Any] = {"model": model, "device": "cuda", "kv_dtype": "bfloat16", "num_pages": 64}
    return SimConfig(**{**values, **changes})


def workload(seed: int) -> list[SimRequest]:
    shape = WorkloadShape(requests=10, max_prompt=200, salts=1, adapters=1, cancellations=0.1)
    return random_workload(random.Random(seed), shape)


def generate(setup: SimConfig, connector: dict[str, str] | None, requests: list[SimRequest]) -> list[SimResult]:
    engine = Engine(setup, None if connector is None else ConnectorConfig(**connector))
    try:
        first = engine.generate(requests, sequential=True, empty_device=True)
        again = [SimRequest(**{**vars(each), "request_id": each.request_id + 1000}) for each in requests]
        return first + engine.generate(again)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("connector", [CONNECTOR, SLOW], ids=["prompt", "slow"])
@pytest.mark.parametrize(
    "changes",
    [
        {"manager": "v1", "windows": FULL},
        {"manager": "v1", "windows": FULL, "chunk_tokens": 64, "overlap": True},
        {"manager": "v2", "windows": MIXED},
        {"manager": "v2", "windows": MIXED, "chunk_tokens": 64, "overlap": True},
        {"manager": "v2", "windows": WINDOWED, "chunk_tokens": 32},
        {"manager": "v2", "windows": FULL, "layer_hooks": "never", "overlap": True, "padding_bytes": 64},
        {"manager": "v2", "windows": MIXED, "shape": {"block_scales": True, "wide_layers": (1,)}, "poison": "garbage"},
        {"manager": "v2", "windows": MIXED, "shape": {"latent_layers": (0, 2), "index_dim": 16}},
        {"manager": "v1", "windows": FULL, "kv_dtype": "float8_e4m3fn"},
        {"manager": "v2", "windows": MIXED, "kv_dtype": "float8_e4m3fn", "chunk_tokens": 64, "overlap": True},
        {"manager": "v2", "windows": MIXED, "kv_dtype": "float8_e4m3fn", "shape": {"block_scales": True}},
    ],
    ids=[
        "v1",
        "v1 chunked overlap",
        "v2",
        "v2 chunked overlap",
        "window",
        "graph",
        "scales",
        "latent",
        "v1 fp8",
        "v2 fp8",
        "fp8 scales",
    ],
)
def test_tokens_on_the_device_equal_those_without_a_connector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], connector: dict[str, str]
) -> None:
    settings = agent_settings(tmp_path, identity={"fingerprint": "gpu"}, tier={"capacity_bytes": 1 << 23})
    write_settings(settings, tmp_path / "s3kv.yaml")
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "s3kv.yaml"))
    setup, requests = config(**changes), workload(len(repr(changes)))
    wanted = {r.request_id: (r.tokens, r.error) for r in generate(setup, None, requests)}
    with running_agent(settings) as agent, install("both", False):
        found = generate(setup, connector, requests)
        counters = agent.call(lambda: next(iter(agent.agent.node.namespaces.values())).directory.counters())  # type: ignore[union-attr]
    whole = [each for each in found if each.error is None]
    assert {each.request_id: each.tokens for each in whole} == {
        each.request_id: wanted[each.request_id][0] for each in whole
    }
    assert sum(each.loaded_tokens for each in found) > 0
    assert counters.resident > 0 and counters.pinned == 0
