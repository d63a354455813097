"""What ends with an object that the runtime drops: older runtimes know no `shutdown`."""

from __future__ import annotations

import _thread
import logging
import weakref
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("s3kv.connector")


def when_dropped(owner: object, close: Callable[..., None], *arguments: Any) -> Callable[[], object]:
    """Calls `close(*arguments)` once `owner` is gone. They must not hold it. Returns what calls that off."""
    finalizer = weakref.finalize(owner, _begin, close, arguments)
    finalizer.atexit = False  # who wants to close at exit, in an order of its own, says so there
    return finalizer.detach


def _begin(close: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """In a thread of its own: `owner` may go in any thread and within any call, also one that holds a lock that `close`
    takes, or in a thread that `close` waits for; nor is anybody to wait for copies there. For the same reason not by
    `threading`, whose own lock may be the one that is held."""
    _thread.start_new_thread(_close, (close, arguments))


def _close(close: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        close(*arguments)
    except Exception:
        logger.exception("an engine that was dropped could not be closed")
