"""Where the scheduler and the worker of one rank find each other.

The runtime builds both from one `llm_args` object, in two threads and in either order, and introduces them never.
So nobody waits: who comes first leaves itself in a room; the scheduler is told the namespace when the worker, after the
cache was registered, publishes it, in the worker's thread. Rooms are keyed on the object and the rank, so several
engines of one process do not mix; a second engine made of the same object gets a room of its own.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from s3kv.connector.layout import PagedCache
from s3kv.identity import NamespaceSpec

Role = Literal["scheduler", "worker"]
OnCache = Callable[[NamespaceSpec, PagedCache], None]


@dataclass
class Room:
    """What one rank's scheduler and worker share."""

    key: object = field(default_factory=lambda: uuid.uuid4().hex)
    members: dict[Role, weakref.ref[Any]] = field(default_factory=dict)
    _published: tuple[NamespaceSpec, PagedCache] | None = None
    _on_cache: weakref.WeakMethod[OnCache] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(self, namespace: NamespaceSpec, cache: PagedCache) -> None:
        """The worker: the cache is registered. Runs the scheduler's start in this thread if it is there already."""
        with self._lock:
            self._published = (namespace, cache)
            callback = self._on_cache() if self._on_cache is not None else None
        if callback is not None:
            callback(namespace, cache)

    def retract(self) -> None:
        """The worker has ended: its cache, which is the engine's memory, is nobody's to keep."""
        with self._lock:
            self._published = None

    def when_published(self, callback: OnCache) -> None:
        """The scheduler: what to do once the cache is known, at once if it is. A method; its object is not kept."""
        with self._lock:
            self._on_cache = weakref.WeakMethod(callback)
            published = self._published
        if published is not None:
            callback(*published)

    @property
    def abandoned(self) -> bool:
        return all(reference() is None for reference in self.members.values())


_lock = threading.Lock()
_rooms: dict[tuple[int, int], list[Room]] = {}


def join(llm_args: Any, rank: int, role: Role, member: object) -> Room:
    """The oldest room of these arguments and this rank that has no such member yet. `member` is not kept alive."""
    key = (id(llm_args), rank)
    with _lock:
        if key not in _rooms:
            _forget_with(llm_args, key)
        rooms = [room for room in _rooms.get(key, []) if not room.abandoned]
        room = next((room for room in rooms if role not in room.members), None)
        if room is None:
            room = Room()
            rooms.append(room)
        room.members[role] = weakref.ref(member)
        _rooms[key] = rooms
        return room


def _forget_with(llm_args: Any, key: tuple[int, int]) -> None:
    """An id may be given to another object once this one is gone."""
    with contextlib.suppress(TypeError):  # no weak references to it: its rooms go when their members have gone
        weakref.finalize(llm_args, _rooms.pop, key, None)
