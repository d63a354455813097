"""Finding the node's agent, or starting one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support.agents import agent_settings, running_agent, small_spec
from support.servers import wait_until

from s3kv.client import launch
from s3kv.client import protocol as p
from s3kv.client.connection import AgentRefused
from s3kv.client.control import Control
from s3kv.client.engine import LeaderClient
from s3kv.settings import load_settings
from s3kv.store.memory import MemoryStore


class Started:
    """Stands in for `start_agent`: remembers what was asked for, and starts nothing."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        patch.setattr(launch, "start_agent", self.asked.append)


def test_an_agent_of_another_release_is_asked_once_and_gets_no_rival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the socket, so an agent started beside it could only end again; and each question is a line in its log."""
    settings = agent_settings(tmp_path, agent={"autostart": True, "start_timeout_s": 1.0})
    started = Started(monkeypatch)
    monkeypatch.setattr("s3kv.client.connection.PROTOCOL", p.PROTOCOL + 1)
    with running_agent(settings, MemoryStore()) as agent:
        leader = LeaderClient(settings, small_spec(), ranks=1, engine_id="e")
        with caplog.at_level(logging.WARNING, "s3kv.client"):
            assert not leader.connect()
        assert "restart the agent" in caplog.text
        agent.until(lambda: agent.totals().refused_clients.labels("protocol")._value.get() == 1)
    assert started.asked == []
    leader.close()


def test_an_agent_that_is_full_is_asked_again_and_gets_no_rival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections of the engine before are still going away."""
    settings = agent_settings(tmp_path, agent={"autostart": True, "max_clients": 1})
    started = Started(monkeypatch)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        first.__exit__(None, None, None)
        agent.until(lambda: not agent._node._connections)

    with running_agent(settings, MemoryStore()) as agent:
        first = Control.open(settings.agent)
        with pytest.raises(AgentRefused, match=r"agent\.max_clients"):
            launch.connect_or_start(settings.agent, "cli", start=False, timeout_s=5)
        launch.connect_or_start(settings.agent, "cli", start=True, timeout_s=5, sleep=sleep).close()
    assert waits and started.asked == []


def test_while_a_started_agent_is_waited_for_a_refusal_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent of another release was quicker to the socket."""
    settings = agent_settings(tmp_path, agent={"autostart": True, "start_timeout_s": 1.0})
    monkeypatch.setattr("s3kv.client.connection.PROTOCOL", p.PROTOCOL + 1)
    others: list[Any] = []

    def quicker(_: Any) -> None:
        others.append(running_agent(settings, MemoryStore()))
        others[-1].__enter__()

    monkeypatch.setattr(launch, "start_agent", quicker)
    waits: list[float] = []
    with pytest.raises(AgentRefused, match="restart the agent"):
        launch.connect_or_start(settings.agent, "cli", start=True, timeout_s=5, sleep=waits.append)
    assert (len(others), waits) == (1, [])
    others[0].__exit__(None, None, None)


@pytest.mark.parametrize("config", ["s3kv.yaml", ""], ids=["in a file", "in variables"])
def test_a_started_agent_finds_relative_paths_where_the_engine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    """And nothing that lies in the engine's folder under a module's name is run."""
    (tmp_path / "s3kv.yaml").write_text("agent: {socket: run/agent.sock}\ncatalog: {index_dir: own/index}\n")
    (tmp_path / "yaml.py").write_text("raise SystemExit('not the real one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("S3KV_STORE__URL", f"file://{tmp_path}/store")
    monkeypatch.setenv("S3KV_TIER__CAPACITY_BYTES", "1MiB")
    monkeypatch.setenv("S3KV_CATALOG__MAP_BYTES", "64MiB")
    if config:
        monkeypatch.setenv("S3KV_CONFIG", config)
    else:
        monkeypatch.setenv("S3KV_AGENT__SOCKET", "run/agent.sock")
        monkeypatch.setenv("S3KV_CATALOG__INDEX_DIR", "own/index")
    settings = load_settings()
    assert settings.agent.socket == tmp_path / "run" / "agent.sock"
    started: list[Any] = []
    start = launch.start_agent
    monkeypatch.setattr(launch, "start_agent", lambda named: started.append(start(named)))
    leader = LeaderClient(settings, small_spec(), ranks=1, engine_id="e")
    try:
        assert leader.connect(), settings.agent.socket.with_suffix(".log").read_text()
        with Control.open(settings.agent) as control:
            assert control.status()["store"] == settings.store.url
            assert wait_until((tmp_path / "own" / "index").is_dir, started[0])
    finally:
        leader.close()
        started[0].kill()
        started[0].wait()
