"""Waiting for people, pipes and sockets so that Ctrl-C and SIGTERM end a command at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_daemon(function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` in a thread that nobody waits for when the command is cancelled.

    In the event loop's own thread a call that blocks keeps a signal from cancelling anything, and for a thread of the
    loop's pool the end of the loop would wait. What is cancelled goes on until the process ends, seen by nobody.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(settler: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            settler(outcome)

    def run() -> None:
        try:
            settling = (done.set_result, function(*arguments))
        except BaseException as error:
            settling = (done.set_exception, error)  # type: ignore[assignment]
        with suppress(RuntimeError):  # the loop is closed: the command has ended
            loop.call_soon_threadsafe(settle, *settling)

    threading.Thread(target=run, name="s3kv-waiting", daemon=True).start()
    return await done
