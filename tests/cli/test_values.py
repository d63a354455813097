"""Values of options that no clock, socket, buffer or division can take are wrong use, in one sentence."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Cli
from support.places import Filled, Place

from s3kv.errors import AgentUnavailable
from s3kv.settings import AgentSettings


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("bench store", "--size", "0"),
        ("bench store", "--size", "512"),
        ("bench store", "--size", "1TiB"),
        ("bench store", "--prefill", "nan"),
        ("bench store", "--ratio", "inf"),
        ("verify", "--sample", "nan"),
        ("warm prompts.txt", "--timeout", "0"),
        ("warm prompts.txt", "--timeout", "1e300"),
        ("warm prompts.txt", "--wait", "1e300"),
        ("agent drain", "--wait", "1e300"),
        ("agent stop", "--wait", "60d"),
        ("gc --orphans", "--grace", "1e300"),
        ("gc --orphans --yes", "--every", "1e300"),
        ("gc", "--max-idle", "1e300"),
        ("gc", "--max-bytes", "1" * 40),
        ("top", "--interval", "1e300"),
    ],
)
def test_a_value_out_of_reach_is_wrong_use(local: Place, command: str, option: str, value: str) -> None:
    ran = local.cli(*command.split(), option, value, "--set", f"agent.socket={local.folder}/agent.sock")
    assert ran.code == 2 and option in ran.err and "internal error" not in ran.err, ran.err
    assert not (local.folder / "store").exists()


@pytest.mark.parametrize("size", ["1KiB", "1025", "1MiB", "3MiB"])
def test_a_bench_puts_objects_of_just_the_size(local: Place, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    from s3kv_cli import bench

    monkeypatch.setattr(bench, "_BLOCK_BYTES", 1 << 19)
    ran = local.cli("bench", "store", "--objects", "2", "--size", size, "--json").ok().json
    assert ran["object_bytes"] == {"1KiB": 1024, "1025": 1025, "1MiB": 1 << 20, "3MiB": 3 << 20}[size]


def test_prompts_of_a_demo_that_are_no_text(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(os.urandom(16) + b"\xff\xfe\x00")
    ran = Cli()("demo", "--prompts", str(prompts))
    assert ran.code == 1 and ran.err == f"s3kv: prompts {prompts} are not UTF-8\n"


def test_a_demo_names_the_store_that_it_cannot_have(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}')
    ran = Cli()("demo", "--store", f"file://{prompts}/kv", "--prompts", str(prompts))
    assert ran.code == 1 and ran.err.startswith("s3kv: store.url") and "Not a directory" in ran.err, ran.err


def test_a_demo_says_why_its_agent_did_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is removed with the demo's folder: to name it says nothing."""
    pytest.importorskip("torch")
    from s3kv.sim import demo

    def never(settings: AgentSettings, role: str, **options: object) -> None:
        log = settings.socket.with_suffix(".log")
        log.write_text("loading\ns3kv: tier.capacity_bytes: no memory\n")
        raise AgentUnavailable(f"no agent answers; the reason is in {log}")

    monkeypatch.setattr(demo, "connect_or_start", never)
    monkeypatch.setattr(demo.Demo, "_engine", lambda *_: [])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}')
    ran = Cli()("demo", "--prompts", str(prompts))
    assert ran.code == 1
    assert ran.err.splitlines()[-1] == "s3kv: the agent did not start: tier.capacity_bytes: no memory"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_server_without_an_address_starts_nothing(local: Place, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from s3kv.sim import serve

    def started(*_: object) -> None:
        raise AssertionError("an engine was started: it starts an agent, which stays")

    monkeypatch.setattr(serve, "EngineThread", started)
    for host, port in (("127.0.0.1", taken), ("256.1.1.1", 0), (f"{'x' * 64}.invalid", 0)):
        ran = local.cli("sim", "serve", "--host", host, "--port", str(port))
        assert ran.code == 2 and "--host, --port" in ran.err, ran.err
    assert not (local.folder / "store").exists()


def without_privileges() -> None:
    """Root passes every folder by two capabilities; a process that starts without them is refused as others are."""
    if os.geteuid() == 0:
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            if ctypes.CDLL(None).prctl(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
                os._exit(77)


def test_a_socket_out_of_reach_is_one_finding_of_the_doctor(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    settings = ("--store", "memory://x", "--set", f"agent.socket={closed}/agent.sock", "--json")
    ran = subprocess.run(
        [sys.executable, "-m", "s3kv_cli.main", "doctor", *settings],
        capture_output=True, text=True, timeout=120, check=False, preexec_fn=without_privileges,
    )  # fmt: skip
    if ran.returncode == 77:
        pytest.skip("this root may not give up its capabilities")
    assert ran.returncode == 1, ran.stderr
    checks = {each["check"]: each for each in json.loads(ran.stdout)["checks"]}
    assert checks["write"]["grade"] == "ok" and "versions" in checks
    assert checks["agent"]["grade"] == "fail" and "Permission denied" in checks["agent"]["detail"]


@pytest.mark.parametrize("command", ["ls", "inspect"])
def test_files_of_the_store_itself_are_no_objects(filled: Filled, command: str) -> None:
    ran = filled.cli(command, ".s3kv/lock")
    assert ran.code == 2 and "internal error" not in ran.err
