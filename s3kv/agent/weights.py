"""A semaphore whose places are bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class ByteSemaphore:
    """At most `capacity` bytes at once, first come first served. A single larger request goes alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Cancelled while it waits, it has taken nothing."""
        size = min(size, self.capacity)
        if self._waiting or self.used + size > self.capacity:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, future))
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._give(size)
                else:
                    with suppress(ValueError):  # it was passed over already
                        self._waiting.remove((size, future))
                    self._wake()
                raise
        else:
            self.used += size
        try:
            yield
        finally:
            self._give(size)

    def _give(self, size: int) -> None:
        self.used -= size
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.capacity:
            size, future = self._waiting.popleft()
            if future.cancelled():
                continue
            self.used += size
            future.set_result(None)
