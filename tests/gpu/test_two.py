"""Tensor parallelism over two CUDA devices, each rank a process of its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support.agents import agent_settings

from s3kv.client.launch import connect_or_start
from s3kv.client.protocol import Drained, Stop
from s3kv.settings import CONFIG_VARIABLE
from s3kv.sim import ConnectorConfig, Engine, SimConfig, SimRequest, install
from s3kv.sim.demo import CONNECTOR, write_settings
from s3kv.sim.workload import WorkloadShape, random_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def generate(
    connector: ConnectorConfig | None, overlap: bool, requests: list[SimRequest]
) -> dict[int, tuple[int, ...]]:
    config = SimConfig(device="cuda", kv_dtype="bfloat16", tp_size=2, num_pages=64, overlap=overlap, chunk_tokens=64)
    engine = Engine(config, connector)
    try:
        first = engine.generate(requests, sequential=True, empty_device=True)
        again = [SimRequest(**{**vars(each), "request_id": each.request_id + 1000}) for each in requests]
        results = first + engine.generate(again)
        if connector is not None:
            assert sum(each.loaded_tokens for each in results) > 0
        return {each.request_id: each.tokens for each in results}
    finally:
        engine.shutdown()


@pytest.mark.parametrize("overlap", [False, True])
def test_two_ranks_on_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    settings = agent_settings(tmp_path, identity={"fingerprint": "gpu"}, tier={"capacity_bytes": 1 << 24})
    write_settings(settings, tmp_path / "s3kv.yaml")
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "s3kv.yaml"))
    requests = random_workload(random.Random(3), WorkloadShape(requests=8, max_prompt=200))
    with install("both", False):
        wanted = generate(None, overlap, requests)
        connection = connect_or_start(settings.agent, "cli", start=True, timeout_s=30)
        try:
            assert generate(ConnectorConfig(**CONNECTOR), overlap, requests) == wanted
        finally:
            connection.call(Stop(connection.next_id(), 1.0), Drained, timeout_s=30)
            connection.close()
