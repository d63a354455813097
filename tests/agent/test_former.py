"""An agent that lacks the memory which engines keep from the one before it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.agents import RunningAgent, agent_settings, running_agent, small_spec

from s3kv.agent.former import check_memory, mapped_arenas
from s3kv.client.engine import WorkerClient
from s3kv.errors import ConfigError
from s3kv.store.memory import MemoryStore

TOO_MUCH = 1 << 50


def test_a_refusal_names_the_engine_that_keeps_the_arena_of_an_agent_that_has_ended(tmp_path: Path) -> None:
    settings, spec = agent_settings(tmp_path), small_spec()
    worker = WorkerClient(settings, spec, rank=0, ranks=1, engine_id="e")
    with running_agent(settings, MemoryStore()):
        assert worker.connect()
    greedy = agent_settings(tmp_path, tier={"capacity_bytes": TOO_MUCH})
    with pytest.raises(
        ConfigError, match=r"^tier\.capacity_bytes: .* keeps that of an agent that has ended while"
    ) as caught:
        RunningAgent(greedy)
    assert "\n" not in str(caught.value)
    assert os.getpid() in mapped_arenas()[1]
    worker.close()


def proc(root: Path, pid: int, *lines: str) -> None:
    (root / "proc" / str(pid)).mkdir(parents=True)
    (root / "proc" / str(pid) / "maps").write_text("".join(f"{line}\n" for line in lines))


def test_an_arena_counts_once_however_many_map_it(tmp_path: Path) -> None:
    proc(tmp_path, 40, "7f0000000000-7f0000010000 rw-s 00000000 00:01 9540    /memfd:s3kv-arena (deleted)")
    proc(
        tmp_path,
        5,
        "55d000000000-55d000001000 r--p 00000000 08:01 77    /usr/bin/python3",
        "7e0000000000-7e0000010000 rw-s 00000000 00:01 9540    /memfd:s3kv-arena (deleted)",
        "7e0000020000-7e0000021000 rw-s 00000000 00:01 9541    /memfd:s3kv-arena (deleted)",
        "7e0000030000-7e0000031000 rw-p 00000000 00:00 0",
    )
    proc(tmp_path, 6, "55d000000000-55d000001000 r--p 00000000 08:01 77    /usr/bin/python3")
    (tmp_path / "proc" / "7").mkdir()  # it has ended meanwhile
    assert mapped_arenas(tmp_path) == (0x11000, [5, 40])
    with pytest.raises(ConfigError, match=r"Arenas of 69632 bytes are mapped already, by processes 5, 40:"):
        check_memory(TOO_MUCH, tmp_path)


def test_without_any_the_refusal_is_about_the_setting_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set it lower$"):
        check_memory(TOO_MUCH, tmp_path)
