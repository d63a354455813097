"""What a chaos run keeps: its processes, and what came of it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Outcome:
    """What a run came to. `problems` empty: every promise held."""

    seed: int
    store: str
    requests: int = 0
    wrong_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass
class Member:
    """A process of the run and the pipe to it."""

    process: Any = None
    pipe: Any = None
    ready: tuple[Any, ...] = ()
    stopping: bool = False

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    @property
    def pids(self) -> list[int]:
        """Its own and, of an engine, its ranks'."""
        ranks = self.ready[0] if self.ready and isinstance(self.ready[0], list) else []
        return [self.process.pid, *ranks]

    def signal(self, number: signal.Signals) -> bool:
        if not self.alive:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        return True

    def tell(self, *message: Any) -> None:
        if self.pipe is not None:
            with suppress(OSError):
                self.pipe.send(message)

    def end(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.process.kill()
        if self.process is not None:
            self.process.join(5)
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None


def is_stopped(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
