"""The main job with real processes: `s3kv demo` over every kind of store, and an agent lost under a running engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.agents import agent_settings
from support.servers import S3Place

from s3kv.client.connection import Connection
from s3kv.client.launch import connect_or_start
from s3kv.client.protocol import Report, Status
from s3kv.settings import CONFIG_VARIABLE, Settings, load_settings
from s3kv.sim.demo import CONNECTOR, only_settings_of, read_prompts, write_settings

S3KV = Path(sys.executable).with_name("s3kv")
PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


def short_prompts(folder: Path) -> Path:
    """Every kind of the example prompts, cut to a length that a test can afford."""
    lines = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    chosen = [*lines[0:2], *lines[12:14], *(line for line in lines if line.get("only_prefix"))][:7]
    for line in chosen:
        line["prompt"] = line["prompt"][:420] + line["prompt"][-200:]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in chosen))
    return path


def run_demo(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [S3KV, "demo", "--json", "--prompts", str(short_prompts(folder)), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def check(result: dict[str, Any]) -> None:
    assert result["tokens_identical"]
    assert result["loaded_fraction"] >= 0.95
    assert result["loaded_tokens"] + result["computed_tokens"] == result["prompt_tokens"]
    assert result["prefix_only"]["loaded_tokens"] > 0
    assert result["objects"] > 0 and result["bytes_stored"] > 0


def test_the_examples_are_real_prompts_that_share_prefixes() -> None:
    prompts = read_prompts(PROMPTS)
    assert sum(prompt.repeated for prompt in prompts) >= 20
    assert all(300 <= len(prompt.tokens) <= 8000 for prompt in prompts)
    starts = [prompt.tokens[:600] for prompt in prompts]
    assert all(starts.count(start) > 1 for start in starts)


def test_the_settings_of_a_file_alone_hold_in_processes_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable wins over the file: the agent of `demo --store b` would store in the variable's a."""
    monkeypatch.setenv("S3KV_STORE__URL", "file:///a")
    monkeypatch.setenv("S3KV_TIER", '{"capacity_bytes": "1GiB"}')
    monkeypatch.setenv("S3KV_ENGINE_ID", "mine")
    before = dict(os.environ)
    settings = Settings.model_validate({"store": {"url": f"file://{tmp_path}/b"}, "tier": {"capacity_bytes": 1 << 22}})
    write_settings(settings, tmp_path / "s3kv.yaml")
    with only_settings_of(tmp_path / "s3kv.yaml"):
        found = load_settings()
        assert os.environ["S3KV_ENGINE_ID"] == "mine"
    assert (found.store.url, found.tier.capacity_bytes) == (settings.store.url, 1 << 22)
    assert dict(os.environ) == before


def test_the_main_job_over_a_folder(tmp_path: Path) -> None:
    check(run_demo(tmp_path))


@pytest.mark.parametrize("server", ["moto_place", "seaweedfs_place"])
def test_the_main_job_over_s3(tmp_path: Path, server: str, request: pytest.FixtureRequest) -> None:
    place: S3Place = request.getfixturevalue(server)
    store = place.values()
    options = [f"--set=store.{name}={store[name]}" for name in ("access_key_id", "secret_access_key")]
    result = run_demo(
        tmp_path, "--store", store["url"], "--endpoint", store["endpoint"], "--region", store["region"], *options
    )
    check(result)
    listed = place.client().list_objects_v2(Bucket=place.bucket, Prefix=f"{place.prefix}/ns/")
    chunks = [entry for entry in listed["Contents"] if "/chunk/" in entry["Key"]]
    assert len(chunks) == result["objects"]
    assert sum(entry["Size"] for entry in chunks) == result["bytes_stored"]


def engine_job(folder: Path, connector: dict[str, str] | None, count: int = 10) -> subprocess.Popen[str]:
    prompts = read_prompts(PROMPTS)[:count]
    job = {
        "config": {"tokens_per_block": 32, "num_pages": 256, "kv_dtype": "bfloat16"},
        "connector": connector,
        "requests": [
            {"request_id": index, "prompt_tokens": prompt.tokens[:1200], "max_new_tokens": 12}
            for index, prompt in enumerate(prompts)
        ],
        "sequential": True,
        "empty_device": True,
    }
    name = "with" if connector else "without"
    (folder / f"{name}.json").write_text(json.dumps(job))
    return subprocess.Popen(
        [sys.executable, "-m", "s3kv.sim.engine", str(folder / f"{name}.json"), str(folder / f"{name}.result")],
        stderr=subprocess.PIPE,
        text=True,
    )


def tokens(folder: Path, engine: subprocess.Popen[str], name: str) -> list[Any]:
    _, errors = engine.communicate(timeout=300)
    assert engine.returncode == 0, errors
    results = json.loads((folder / f"{name}.result").read_text())["results"]
    assert all(each["error"] is None for each in results)
    return [each["tokens"] for each in results]


def agent_status(connection: Connection) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(connection.call(Status(connection.next_id()), Report, timeout_s=20).text)
    return status


def start_agent(settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Connection:
    write_settings(settings, folder / "s3kv.yaml")
    monkeypatch.setenv(CONFIG_VARIABLE, str(folder / "s3kv.yaml"))
    return connect_or_start(settings.agent, "cli", start=True, timeout_s=20)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_losing_the_agent_under_a_running_engine_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    without = engine_job(tmp_path, None)
    wanted = tokens(tmp_path, without, "without")
    settings = agent_settings(
        tmp_path, identity={"fingerprint": "demo"}, tier={"capacity_bytes": 1 << 26}, agent={"call_timeout_s": 0.1}
    )
    connection = start_agent(settings, tmp_path, monkeypatch)
    pid = agent_status(connection)["pid"]
    try:
        engine = engine_job(tmp_path, CONNECTOR)
        while agent_status(connection)["totals"]["saved_blocks"] < 40:
            assert engine.poll() is None, "the engine ended before the agent was lost"
        os.kill(pid, number)
        assert tokens(tmp_path, engine, "with") == wanted
    finally:
        os.kill(pid, signal.SIGKILL)
        connection.close()
