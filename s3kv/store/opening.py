"""From settings to a store."""

from __future__ import annotations

from pathlib import Path

from s3kv.settings import StoreSettings
from s3kv.store.base import Store
from s3kv.store.keys import Location, parse_url
from s3kv.store.local import LocalStore
from s3kv.store.memory import MemoryStore

_named: dict[str, MemoryStore] = {}


def open_store(settings: StoreSettings) -> Store:
    """The store that `settings` describe; no request is made yet.

    `memory://` is a new, empty store; `memory://NAME` is the same one for everybody in this process.
    Raises ConfigError, one sentence that names the setting.
    """
    return _open(parse_url(settings.url), settings)


def _open(location: Location, settings: StoreSettings) -> Store:
    if location.scheme == "memory":
        return _named.setdefault(location.root, MemoryStore()) if location.root else MemoryStore()
    if location.scheme == "file":
        return LocalStore(Path(location.root))
    raise NotImplementedError
