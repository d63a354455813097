"""From settings to a store."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from s3kv.errors import ConfigError
from s3kv.settings import StoreSettings
from s3kv.store.base import Store
from s3kv.store.conditional import ConditionalStore
from s3kv.store.failures import named
from s3kv.store.guard import GuardedStore, Limits, StoreEvents
from s3kv.store.keys import Location, parse_url
from s3kv.store.local import LocalStore
from s3kv.store.memory import MemoryStore
from s3kv.store.s3_config import s3_config

_named: dict[str, MemoryStore] = {}


def open_store(
    settings: StoreSettings,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    rng: random.Random | None = None,
    events: StoreEvents | None = None,
) -> GuardedStore:
    """The guarded store that `settings` describe; no request is made yet, a folder is created.

    `memory://` is a new, empty store; `memory://NAME` is the same one for everybody in this process. `clock` must run
    with the event loop's (deadlines are the loop's). Raises ConfigError, one sentence that names the setting.
    """
    inner = open_unguarded(settings)
    return GuardedStore(inner, Limits.from_settings(settings), clock=clock, sleep=sleep, rng=rng, events=events)


def open_unguarded(settings: StoreSettings) -> Store:
    """The same without deadlines, retries and breaker: for tests, and to put something in between."""
    location = parse_url(settings.url)
    if location.scheme == "memory":
        return _named.setdefault(location.root, MemoryStore()) if location.root else MemoryStore()
    if location.scheme == "file":
        return LocalStore(Path(location.root))
    return ConditionalStore(_open_s3(settings, location), settings.conditional_put)


def _open_s3(settings: StoreSettings, location: Location) -> Store:
    config = s3_config(settings, location)
    if settings.client == "obstore":
        from s3kv.store.obstore_s3 import ObstoreS3

        return ObstoreS3(settings, config)
    try:
        from s3kv.store.aioboto3_s3 import Aioboto3S3
    except ImportError as error:
        raise ConfigError(
            f"{named('client')} is aioboto3, which is not installed: pip install s3kv-cache[aioboto3]"
        ) from error
    return Aioboto3S3(settings, config)
