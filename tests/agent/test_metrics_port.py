from __future__ import annotations

import asyncio
import http.client
import socket
from pathlib import Path

import pytest
from support.agents import FakeEngine, agent_settings, running_agent, small_spec

from s3kv.store.memory import MemoryStore


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def scraped(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def test_what_prometheus_scrapes_is_of_now_without_anybody_asking_for_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3kv.agent.service.GAUGES_EVERY_S", 0.001)
    port, spec = free_port(), small_spec()
    settings = agent_settings(tmp_path, agent={"metrics_port": port})
    wanted = f's3kv_tier_slots{{namespace="{spec.name}",state="resident"}} 0.0'
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        engine.save(engine.chain(1, 3))  # and asks for the status at its end
        assert wanted not in scraped(port)
        assert agent.forget() == 3
        for _ in range(500):
            if wanted in scraped(port):
                break
            agent.call(lambda: asyncio.sleep(0.002))
        assert wanted in scraped(port)
        engine.close()
