"""What becomes of a command whose output nobody reads, or that has no room: quiet and 0, or one line and 1."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Cli

COMMANDS = [
    ("--version",),
    ("--help",),
    ("gc", "--help"),
    ("config", "show"),
    ("config", "show", "--json"),
    ("config", "template"),
    ("--store", "memory://x", "ls"),
    ("--store", "memory://x", "ls", "--json"),
]
commands = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@pytest.fixture(params=["buffered", "unbuffered"])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "S3KV_", "AWS_"))}
    kept = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return {**own, **kept, **({"PYTHONUNBUFFERED": "1"} if request.param == "unbuffered" else {})}


@pytest.fixture
def nobody_reads() -> Iterator[int]:
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def ran(command: tuple[str, ...], environment: dict[str, str], stdout: int) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "s3kv_cli.main", *command],
        stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    return done.returncode, done.stderr


@commands
def test_a_reader_that_has_gone_is_no_fault(
    command: tuple[str, ...], environment: dict[str, str], nobody_reads: int
) -> None:
    assert ran(command, environment, nobody_reads) == (0, "")


@commands
def test_a_full_disk_is_one_line(command: tuple[str, ...], environment: dict[str, str]) -> None:
    full = Path("/dev/full")
    if not full.is_char_device():
        pytest.skip("this system has no /dev/full")
    with full.open("wb") as out:
        code, said = ran(command, environment, out.fileno())
    assert code == 1 and said.startswith("s3kv: ") and "No space left on device" in said and said.count("\n") == 1


def test_a_finding_stays_one_when_its_output_is_lost(environment: dict[str, str], nobody_reads: int) -> None:
    assert ran(("--store", "memory://x", "usage", "--namespace", "absent"), environment, nobody_reads)[0] == 1
    assert ran(("gc", "--max-bytes", "lots"), environment, nobody_reads)[0] == 2


def test_wrong_use_is_told_as_ever() -> None:
    ran = Cli()("gc", "--nonsense")
    assert ran.code == 2 and "Usage: s3kv gc" in ran.err and "No such option" in ran.err
    assert Cli()("bucket").code == 2
