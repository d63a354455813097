"""obstore's threads and the interpreter: started while that can still fail well, waited for before Python ends.

obstore's own threads hand each answer to the event loop: they take the interpreter's lock, call
`loop.call_soon_threadsafe`, and let go of the lock for a moment inside it, when the loop is already awake. Up to Python
3.13 a thread that asks for the lock once the interpreter began to end is ended by `pthread_exit` (the C API's
documentation of `PyEval_RestoreThread`), and frames of Rust turn that into an abort: an agent or a command that had
done all of its work would end with SIGABRT.
"""

from __future__ import annotations

import atexit
import threading
from asyncio import Future
from collections import deque
from typing import Any
from weakref import ref

import obstore
from obstore.store import MemoryStore

from s3kv.errors import ConfigError
from s3kv.store.failures import named

EXIT_WAIT_S = 2.0
_PAUSE_S = 0.001
_LATEST = 4096
"""Requests under way, or cancelled and not yet given up by obstore, are always fewer than this."""

_latest: deque[ref[Future[Any]]] = deque(maxlen=_LATEST)


def start() -> None:
    """Make obstore start its threads now. Raises ConfigError when the machine has no descriptor or thread for them.

    Left to the first request, a moment without descriptors makes obstore unusable for the rest of the process: its
    runtime is poisoned, and every later call panics.
    """
    try:
        obstore.put(MemoryStore(), "start", b"")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise ConfigError(f"{named('client')}: obstore cannot start: {error}") from error


def watch(request: object) -> None:
    """Remember that obstore's threads will come back for `request`, which obstore returned and nobody awaited yet.

    They refer to it until they are through with it, so its end is theirs; who awaits it must not keep it. A weak
    reference without a callback: a callback would run Python in their threads, where they could again be met without
    the lock.
    """
    if isinstance(request, Future):
        _latest.append(ref(request))


@atexit.register
def _wait() -> None:
    """Give obstore's threads the lock until they are through with every request; at most `EXIT_WAIT_S`."""
    pause = threading.Event()
    for _ in range(int(EXIT_WAIT_S / _PAUSE_S)):
        if all(seen() is None for seen in _latest):
            return
        MemoryStore()  # any call makes obstore drop what its threads could not drop without the lock
        pause.wait(_PAUSE_S)
