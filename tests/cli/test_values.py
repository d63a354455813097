"""Values of options that no clock, socket, buffer or division can take are wrong use, in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.command import Cli
from support.places import Filled, Place


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


@pytest.mark.parametrize("command", ["ls", "inspect"])
def test_files_of_the_store_itself_are_no_objects(filled: Filled, command: str) -> None:
    ran = filled.cli(command, ".s3kv/lock")
    assert ran.code == 2 and "internal error" not in ran.err
