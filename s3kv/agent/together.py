"""Concurrent work over borrowed slots: nothing of it runs on once the caller goes on.

`asyncio.gather` leaves its other tasks running after a failure; here they could still copy into or out of a slot that
has been given to another block by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")

PASS_ON = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)
"""What background work lets through; anything else must be dealt with, or a fault would end it silently for good."""


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. After a failure or a cancellation the rest is cancelled and awaited, then it raises."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await _ended(tasks)
    failures = [task for task in tasks if not task.cancelled() and task.exception() is not None]
    for task in failures:
        task.result()
    return [task.result() for task in tasks]


async def in_thread(executor: Executor, function: Callable[..., T], *arguments: object) -> T:
    """Run `function` in a thread, to its end even when cancelled."""
    future = asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await _ended([future])
        raise


async def _ended(futures: list[asyncio.Future[T]] | list[asyncio.Task[T]]) -> None:
    """Wait for all, through any number of cancellations, and pass the last of these on."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
