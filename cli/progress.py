"""Progress bars that appear only when they are of use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

SHOW_AFTER_S = 1.0


class Meter:
    """Counts work done. `advance` is cheap; `_lock` lets a thread that works call it, also when the meter is over."""

    def __init__(self, start: Callable[[str], Any], title: str, total: int | None, clock: Callable[[], float]) -> None:
        self._start = start
        self._clock = clock
        self._began = clock()
        self._bar: Any = None
        self._task: Any = None
        self._lock = threading.Lock()
        self._over = False
        self.title = title
        self.total = total
        self.done = 0

    def advance(self, count: int = 1) -> None:
        self.done += count
        with self._lock:
            if self._over:
                return  # a bar that begins now would stay, and the terminal's cursor hidden
            if self._bar is None and self._clock() - self._began >= SHOW_AFTER_S:
                self._bar, self._task = self._start(self.title)
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, total=self.total)

    def phase(self, title: str, total: int | None, count: int = 1) -> None:
        """As `advance`, within the phase `title` of the work; a new phase begins at zero."""
        if title != self.title:
            self.title, self.total, self.done = title, total, 0
            if self._bar is not None:
                self._bar.update(self._task, description=title)
        self.advance(count)

    def stop(self) -> None:
        with self._lock:
            self._over = True
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def running_meter(
    console: Console,
    title: str,
    total: int | None,
    *,
    size: bool,
    visible: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Meter]:
    """A meter that shows itself after SHOW_AFTER_S, when the console is a terminal."""
    shown = visible and console.is_terminal

    def start(current: str) -> Any:
        return _bar(console, current, total, size=size) if shown else (None, None)

    meter = Meter(start, title, total, clock)
    try:
        yield meter
    finally:
        meter.stop()


def _bar(console: Console, title: str, total: int | None, *, size: bool) -> Any:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = [DownloadColumn(), TransferSpeedColumn()] if size else [MofNCompleteColumn()]
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        *counts,
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(title, total=total)
    bar.start()
    return bar, task
