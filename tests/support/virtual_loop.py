"""An event loop with virtual time whose interleaving is chosen by a seed.

Of all callbacks that are ready it runs a random one, not the oldest, so any order that awaiting code must bear can
happen; time jumps to the next timer when nothing is ready. The same seed gives the same run. Work for executors is
done on the spot. There is no I/O: what waits for a socket or another thread never ends (RuntimeError).
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SeededLoop(asyncio.BaseEventLoop):
    def __init__(self, rng: random.Random, start_s: float = 0.0) -> None:
        super().__init__()
        self._rng = rng
        self._now = start_s
        self.steps = 0

    @property
    def is_idle(self) -> bool:
        return not self._ready  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        scheduled: list[Any] = self._scheduled  # type: ignore[attr-defined]
        if not ready:
            while scheduled and scheduled[0]._cancelled:
                heapq.heappop(scheduled)._scheduled = False
            if not scheduled:
                raise RuntimeError("every task waits for something that cannot happen")
            self._now = max(self._now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._now:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            ready.append(timer)
        at = int(self._rng.random() * len(ready))
        ready.rotate(-at)
        handle = ready.popleft()
        ready.rotate(at)
        self.steps += 1
        if not handle._cancelled:
            handle._run()

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _process_events(self, event_list: object) -> None:
        raise AssertionError("no I/O")

    def _write_to_self(self) -> None:
        """Threads do not exist here."""


def run_seeded(seed: int, main: Callable[[SeededLoop, random.Random], Coroutine[Any, Any, T]], start_s: float) -> T:
    """Runs `main(loop, rng)` to its end; tasks that are left are cancelled."""
    rng = random.Random(seed)
    loop = SeededLoop(rng, start_s)
    try:
        return loop.run_until_complete(main(loop, rng))
    finally:
        loop.run_until_complete(_end_others(loop))
        loop.close()


async def _end_others(loop: SeededLoop) -> None:
    """Also what ends with them: generators that were left in the middle are closed by tasks of their own."""
    while True:
        left = asyncio.all_tasks(loop) - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.gather(*left, return_exceptions=True)
        elif not loop.is_idle:
            await asyncio.sleep(0)
        else:
            return
