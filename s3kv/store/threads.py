"""Threads for work on slots' memory, all of them started before the first of it.

`concurrent.futures` starts threads on demand. When the machine refuses one, `submit` raises, but the job stays in the
pool's queue, and a thread that can be started later runs it then: it would copy into a slot that has been given to
another block meanwhile.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from s3kv.errors import ConfigError

START_TIMEOUT_S = 30.0


class StartedThreads(ThreadPoolExecutor):
    """A pool of exactly `count` threads. Raises ConfigError, naming `setting`, when the machine has not so many."""

    def __init__(self, count: int, name: str, setting: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        started = threading.Barrier(count + 1)
        try:
            for _ in range(count):  # one waits in each thread, so each takes another one
                self.submit(started.wait, START_TIMEOUT_S)
            started.wait(START_TIMEOUT_S)
        except (RuntimeError, threading.BrokenBarrierError) as error:
            started.abort()
            self.shutdown(wait=False, cancel_futures=True)
            raise ConfigError(f"{setting}: {count} threads could not be started: {error}") from error
