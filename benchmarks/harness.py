"""What every benchmark here shares: races in one run, medians, ratios to a limit, the machine, a table and JSON.

Absolute figures belong to one machine on one day, and machines are shared; ratios are what counts. So contestants are
run in turn, round by round, in one process, and a ratio is the median over the rounds of the two figures of one round:
what slows the machine for a second slows both. Beside wall time there is the CPU time of this process and of its
children that have ended (`resource.getrusage`), which neighbours disturb less.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks import RESULTS, ROOT

PACKAGES = ("obstore", "boto3", "aioboto3", "lmdb", "numpy", "xxhash", "zstandard", "msgspec", "torch")
MIB, GIB, GB = 1 << 20, 1 << 30, 1e9
MIN_ROUNDS = 3


@dataclass(frozen=True)
class Options:
    """`quick`: smaller sizes and fewer rounds, for a look at whether something broke; its figures are not kept."""

    quick: bool = False

    def rounds(self, full: int) -> int:
        return max(MIN_ROUNDS, full // 4) if self.quick else full


@dataclass
class Series:
    """Seconds of one contestant, by round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return statistics.median(self.wall)

    @property
    def cpu_s(self) -> float:
        return statistics.median(self.cpu)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.wall)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


Clock = Literal["wall", "cpu"]


def ratio(of: Series, to: Series, clock: Clock = "wall") -> float:
    """Median over the rounds of `of / to`, both of one round."""
    pairs = zip(getattr(of, clock), getattr(to, clock), strict=True)
    return statistics.median(a / b for a, b in pairs if b > 0)


def cpu_seconds() -> float:
    """User and system time of this process, threads included, and of its children that were waited for."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds of one call. CPU by the process clock, which is finer than getrusage."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def race(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = 1,
    before: Callable[[str], object] = lambda name: None,
    budget_s: float = 60.0,
) -> dict[str, Series]:
    """Runs every contestant once a round, the first one another each round. `before(name)` is not timed.

    A busy machine gets fewer rounds: none is begun after `budget_s`, once there are MIN_ROUNDS.
    """
    names = list(contestants)
    series = {name: Series() for name in names}
    end = time.perf_counter() + budget_s
    for number in range(-warm_up, rounds):
        if number >= MIN_ROUNDS and time.perf_counter() > end:
            break
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            before(name)
            wall, cpu = timed(contestants[name])
            if number >= 0:
                series[name].wall.append(wall)
                series[name].cpu.append(cpu)
    return series


@dataclass(frozen=True)
class Goal:
    """What a row is held against: its ratio to the peer, or its own figure."""

    sign: Literal["<=", ">="]
    bound: float
    of: Literal["ratio", "figure"] = "ratio"

    def met(self, value: float) -> bool:
        return value <= self.bound if self.sign == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{'≤' if self.sign == '<=' else '≥'} {self.bound:g}" + (" ×" if self.of == "ratio" else "")


def at_most(bound: float, of: Literal["ratio", "figure"] = "ratio") -> Goal:
    return Goal("<=", bound, of)


def at_least(bound: float, of: Literal["ratio", "figure"] = "ratio") -> Goal:
    return Goal(">=", bound, of)


@dataclass(frozen=True)
class Row:
    """`figure` in `unit`, against `peer_figure` (same unit) of `peer`; `ratio` is the one of the paired rounds."""

    what: str
    figure: float
    unit: str
    peer: str = ""
    peer_figure: float | None = None
    ratio: float | None = None
    goal: Goal | None = None

    @property
    def met(self) -> bool | None:
        judged = self.figure if self.goal is not None and self.goal.of == "figure" else self.ratio
        return None if self.goal is None or judged is None else self.goal.met(judged)

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("what", "figure", "unit", "peer", "peer_figure", "ratio")}
        return {**fields, "goal": str(self.goal) if self.goal else None, "met": self.met}


_UNITS = {"s": 1.0, "ms": 1e3, "µs": 1e6}


class Report:
    """What one benchmark found. `data` holds what plots need."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.data: dict[str, Any] = {}

    def row(self, what: str, figure: float, unit: str, **fields: Any) -> None:
        self.rows.append(Row(what, figure, unit, **fields))

    def times(
        self, what: str, of: Series, peer: str, to: Series, *, unit: str = "ms", clock: Clock = "wall",
        goal: Goal | None = None,
    ) -> None:  # fmt: skip
        """A row of median times; a ratio below 1 is faster than the peer."""
        scale = _UNITS[unit]
        figures = [statistics.median(getattr(each, clock)) * scale for each in (of, to)]
        unit = f"{unit} CPU" if clock == "cpu" else unit
        self.row(what, figures[0], unit, peer=peer, peer_figure=figures[1], ratio=ratio(of, to, clock), goal=goal)

    def rates(
        self, what: str, of: Series, peer: str, to: Series, nbytes: int, *, goal: Goal | None = None,
        cpu_goal: Goal | None = None, cpu: bool = True,
    ) -> None:  # fmt: skip
        """Rows of MB/s, where a ratio above 1 is faster than the peer, and of CPU seconds a GB, where below 1 is."""
        speeds = [nbytes / 1e6 / each.wall_s for each in (of, to)]
        self.row(
            what, speeds[0], "MB/s", peer=peer, peer_figure=speeds[1], ratio=1 / ratio(of, to, "wall"), goal=goal
        )  # fmt: skip
        if cpu:
            costs = [each.cpu_s / (nbytes / GB) for each in (of, to)]
            self.row(
                f"{what}: CPU", costs[0], "s/GB", peer=peer, peer_figure=costs[1], ratio=ratio(of, to, "cpu"),
                goal=cpu_goal,
            )  # fmt: skip

    def note(self, text: str) -> None:
        self.notes.append(text)

    def show(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left", show_edge=False, pad_edge=False)
        for heading in ("", "figure", "limit or peer", "its figure", "ratio", "goal", ""):
            table.add_column(heading, justify="left" if heading in ("", "limit or peer") else "right")
        for row in self.rows:
            peer = "" if row.peer_figure is None else f"{short(row.peer_figure)} {row.unit}"
            shown = "" if row.ratio is None else f"{row.ratio:.2f}"
            verdict = {None: "", True: "met", False: "MISSED"}[row.met]
            figure = f"{short(row.figure)} {row.unit}"
            table.add_row(row.what, figure, row.peer, peer, shown, str(row.goal or ""), verdict)
        console.print(table)
        for note in self.notes:
            console.print(note, style="dim", highlight=False)
        console.print()


def short(value: float) -> str:
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def machine() -> dict[str, Any]:
    """What the figures were taken on; no names of hosts or people."""
    meminfo = Path("/proc/meminfo").read_text()
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(meminfo.split("MemTotal:")[1].split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """The commit that was measured, with a + when the tree differed from it; "" outside a checkout."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        code = ("s3kv", "benchmarks", ":(exclude)benchmarks/results")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *code)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run(name: str, benchmark: Callable[[Options], Report], options: Options, folder: Path = RESULTS) -> Report:
    """Runs one benchmark, prints its table and, unless it was a quick run, writes `folder/NAME.json`."""
    load, began = os.getloadavg()[0], time.perf_counter()
    report = benchmark(options)
    seconds = time.perf_counter() - began
    report.show(Console(width=150))
    if options.quick:
        return report
    fields = {
        "benchmark": name,
        "title": report.title,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "seconds": round(seconds, 1),
        "load_before": round(load, 2),
        "machine": machine(),
        "rows": [row.to_json() for row in report.rows],
        "notes": report.notes,
        "data": report.data,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(fields, indent=1) + "\n")
    return report


def memory_kib(fields: Sequence[str] = ("VmRSS", "RssAnon", "RssFile", "VmHWM")) -> dict[str, int]:
    """This process's memory from /proc, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return {name: int(found.get(name, 0)) for name in fields}
