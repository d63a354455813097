"""Records of several chunks in one log segment: a PUT costs the same for one record as for a thousand.

Invariant kept here: a record is published only after every object of its chunk is durable (invariant 6); its caller
goes on only once the segment is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from s3kv.agent.together import PASS_ON
from s3kv.errors import StoreError
from s3kv.format.records import Record


class Publisher:
    """`publish(records)` writes one segment; at most one is being written at a time."""

    def __init__(self, publish: Callable[[Sequence[Record]], Awaitable[None]], interval_s: float) -> None:
        self._publish = publish
        self._interval_s = interval_s
        self._waiting: list[tuple[Record, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    async def publish(self, record: Record) -> None:
        """Returns once the record's segment is durable. Raises what the store raised; then nothing was published."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        await future

    def hurry(self) -> None:
        """Do not wait for company any more (a drain)."""
        self._hurry.set()

    def relax(self) -> None:
        self._hurry.clear()

    async def stop(self) -> None:
        """Nothing more is published; whoever waits for it has been cancelled before."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiting:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            batch, self._waiting = self._waiting, []
            error: BaseException | None = None
            try:
                await self._publish([record for record, _ in batch])
            except PASS_ON:
                raise
            except BaseException as caught:
                error = caught if isinstance(caught, Exception) else StoreError(str(caught))
            for _, future in batch:
                if future.done():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
