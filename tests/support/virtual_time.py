"""An event loop whose clock jumps: coroutines with deadlines of minutes run in no time, and always alike.

    with virtual_time() as run: result = run(main())      # asyncio.get_running_loop().time() is the virtual clock

Only for code without real I/O: whatever waits for a socket or a thread would see its deadlines pass at once.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class _InstantSelector(selectors.SelectSelector):
    """Instead of waiting, tell the loop how long it would have waited."""

    skip: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.skip(timeout)
        if not ready and timeout is None:
            raise RuntimeError("every task waits for something that cannot happen")
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _InstantSelector()
        super().__init__(selector)
        self.now = 1000.0
        selector.skip = self._skip

    def _skip(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now


@contextmanager
def virtual_time() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        yield runner.run


def virtual_clock() -> float:
    """The running loop's time: hand it to what takes a clock."""
    return asyncio.get_running_loop().time()
