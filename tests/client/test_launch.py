"""Finding the node's agent, or starting one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support.agents import agent_settings, running_agent, small_spec

from s3kv.client import launch
from s3kv.client import protocol as p
from s3kv.client.connection import AgentRefused
from s3kv.client.engine import LeaderClient
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
