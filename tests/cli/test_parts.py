"""Small parts: numbers, progress, what a machine allows, what a bucket's speed is worth."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from s3kv_cli.progress import running_meter
from s3kv_cli.text import duration, parse_duration, parse_size, size

from s3kv.store.bench import Rates, break_even
from s3kv.tier.host import read_host_memory


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("10GiB", 10 << 30), ("1.5TiB", 3 << 39), ("20 kB", 20_000), ("7b", 7)]
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(("text", "value"), [("90", 90), ("30d", 2_592_000), ("1.5h", 5400), ("10min", 600)])
def test_durations(text: str, value: float) -> None:
    assert parse_duration(text) == value


@pytest.mark.parametrize("text", ["", "x", "10parsecs", "-1", "nan", "inf", "1e999"])
def test_what_is_no_quantity(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with pytest.raises(ValueError):
            parse(text)


def test_numbers_for_people() -> None:
    assert [size(value) for value in (0, 1023, 1536, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 TiB"]
    assert [duration(value) for value in (0, 0.004, 59, 5400, 172_800)] == ["0 s", "4.0 ms", "59.0 s", "1.5 h", "2.0 d"]


@pytest.mark.parametrize(("terminal", "seconds", "shown"), [(True, 2.0, True), (True, 0.5, False), (False, 9.0, False)])
def test_a_bar_appears_after_a_second_on_a_terminal_only(terminal: bool, seconds: float, shown: bool) -> None:
    out = io.StringIO()
    now = [0.0]
    console = Console(file=out, force_terminal=terminal, width=80)
    with running_meter(console, "work", 10, size=False, visible=True, clock=lambda: now[0]) as meter:
        now[0] = seconds
        meter.advance(4)
    assert meter.done == 4 and ("work" in out.getvalue()) is shown


def test_a_thread_that_goes_on_after_an_interruption_shows_no_bar() -> None:
    out = io.StringIO()
    now = [0.0]
    console = Console(file=out, force_terminal=True, width=80)
    with running_meter(console, "work", 10, size=False, visible=True, clock=lambda: now[0]) as meter:
        meter.advance()
    now[0] = 2.0
    meter.advance()
    assert meter.done == 2 and not out.getvalue()


def test_the_smallest_limit_of_memory_counts() -> None:
    files = {"/proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 1500 kB\n", "/sys/fs/cgroup/memory.max": "1048576\n"}

    def read(path: Path) -> str:
        try:
            return files[str(path)]
        except KeyError:
            raise FileNotFoundError(path) from None

    memory = read_host_memory(read, lambda: 65536)
    assert (memory.total, memory.available, memory.control_group, memory.locked) == (2048000, 1536000, 1048576, 65536)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert read_host_memory(read, lambda: -1) == type(memory)(2048000, 1536000, None, None)
    assert read_host_memory(lambda path: read(Path("/absent")), lambda: -1).available is None


def test_break_even_is_where_latency_is_paid_back() -> None:
    rates = Rates(4, 1 << 20, 4, 1e9, 1e9, (0.05, 0.05, 0.05))
    even = break_even(rates, bytes_per_token=100_000, prefill_tokens_s=5000.0)
    # 0.05 s + n * 100 µs = n * 200 µs
    assert even.tokens == 501 and even.load_tokens_s == pytest.approx(10_000)
    assert break_even(rates, bytes_per_token=100_000, prefill_tokens_s=10_001.0).tokens is None


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("name", ["-", "prompts.txt"])
def test_prompts_are_utf_8_whatever_the_locale_says(tmp_path: Path, start: bytes, name: str) -> None:
    code = f"from s3kv_cli.warm import _lines\nwith _lines({name!r}) as lines: print(ascii(list(lines)))"
    text = start + "größer\n".encode()
    (tmp_path / "prompts.txt").write_bytes(text)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], input=text, capture_output=True, env=environment, cwd=tmp_path, check=True
    )
    assert ran.stdout.decode().strip() == ascii(["größer\n"])
