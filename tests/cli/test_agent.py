"""Commands that speak to the node's agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import FakeEngine, RunningAgent, agent_settings, running_agent, small_spec
from support.command import Cli

from s3kv.client.sample import Sample, between


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    with running_agent(agent_settings(tmp_path)) as running:
        yield running


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli("--set", f"agent.socket={tmp_path}/agent.sock", "--store", f"file://{tmp_path}/store")


def test_without_an_agent_one_sentence_names_the_setting(cli: Cli) -> None:
    ran = cli("agent", "status")
    assert ran.code == 1
    assert ran.err.startswith("s3kv: no agent answers at ") and "agent.socket" in ran.err and ran.err.count("\n") == 1


def test_status_top_forget_drain(agent: RunningAgent, cli: Cli) -> None:
    engine = FakeEngine.start(agent.settings, small_spec())
    try:
        status = cli("agent", "status", "--json").ok().json
        assert status["namespaces"][0]["model"] == "test"
        assert "test" in cli("agent", "status").ok().out
        view = cli("top", "--interval", "0.05", "--json").ok().json
        assert view["status"]["store"] == status["store"]
        assert "Calls to the store" in cli("top", "--interval", "0.05").ok().out
        looks = cli("top", "--interval", "0.05", "--count", "3", "--json").ok().out.splitlines()
        assert [json.loads(look)["status"]["store"] for look in looks] == [status["store"]] * 3
        assert cli("agent", "forget", "--json").ok().json == {"blocks": 0}
        assert cli("agent", "forget", "-n", "absent").code == 2
        assert cli("agent", "drain", "--wait", "5s", "--json").ok().json["unsaved_blocks"] == 0
    finally:
        engine.close()


def test_run_and_stop(tmp_path: Path) -> None:
    """`agent run` in a process of its own; `agent stop` ends it and it exits 0."""
    socket = tmp_path / "agent.sock"
    command = [sys.executable, "-m", "s3kv_cli.main", "--store", f"file://{tmp_path}/store"]
    process = subprocess.Popen(
        [*command, "--set", f"agent.socket={socket}", "agent", "run"], env={**os.environ}, stderr=subprocess.DEVNULL
    )
    try:
        cli = Cli("--set", f"agent.socket={socket}")
        while cli("agent", "status").code:
            assert process.poll() is None
        assert cli("agent", "stop", "--wait", "5s", "--json").ok().json == {"chunks": 0, "unsaved_blocks": 0}
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


METRICS = """# TYPE s3kv_matched_blocks counter
s3kv_matched_blocks_total{found="tier"} %d
s3kv_matched_blocks_total{found="nowhere"} %d
# TYPE s3kv_uploaded_bytes counter
s3kv_uploaded_bytes_total %d
# TYPE s3kv_store_call_seconds histogram
s3kv_store_call_seconds_bucket{call="get",le="0.1",result="ok"} %d
s3kv_store_call_seconds_bucket{call="get",le="1.0",result="ok"} %d
s3kv_store_call_seconds_bucket{call="get",le="+Inf",result="ok"} %d
s3kv_store_call_seconds_count{call="get",result="ok"} %d
s3kv_store_call_seconds_sum{call="get",result="ok"} %f
"""


def test_view_is_what_happened_between_two_samples() -> None:
    before = Sample.parse(10.0, METRICS % (100, 0, 1000, 5, 5, 5, 5, 0.5), {})
    after = Sample.parse(12.0, METRICS % (130, 10, 5000, 6, 8, 8, 8, 2.0), {})
    view = between(before, after)
    assert view.share("tier") == 0.75
    assert view.rates["uploaded_bytes"] == 2000
    (call,) = view.calls
    assert (call.name, call.count, call.mean_s, call.slowest_s) == ("get", 3, 0.5, 1.0)


def test_counters_that_fell_are_of_a_new_agent() -> None:
    before = Sample.parse(10.0, METRICS % (100, 0, 1000, 5, 5, 5, 5, 0.5), {})
    after = Sample.parse(11.0, METRICS % (4, 1, 10, 1, 1, 1, 1, 0.1), {})
    assert between(before, after).found == {"tier": 4, "nowhere": 1}
