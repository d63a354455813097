"""What an engine has of each run of the agent and has not given back: the agent's own account, kept should it die.

Invariant kept here: memory of a run that is over is needed until every lease and every reserved slot has been given
back, by the same calls with which the agent is told that it may give those slots to others. Whoever forgets one keeps
the memory longer, never shorter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from s3kv.identity import NamespaceSpec


class Holdings:
    """Thread-safe. The leader's and the worker's client of an engine of one rank share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._leases: dict[int, set[int]] = {}
        self._others: dict[int, int] = {}
        self.led = False
        """Whether the leader's client keeps its part here; without it nothing is known of offers."""

    @contextmanager
    def asking(self, epoch: int) -> Iterator[None]:
        """For the time of a call: what is answered may be held."""
        self.reserved(epoch, 1)
        try:
            yield
        finally:
            self.reserved(epoch, -1)

    def leased(self, epoch: int, lease: int) -> None:
        with self._lock:
            self._leases.setdefault(epoch, set()).add(lease)

    def released(self, epoch: int, lease: int) -> None:
        with self._lock:
            self._leases.get(epoch, set()).discard(lease)

    def reserved(self, epoch: int, slots: int) -> None:
        """So many slots more are to be written, or less for a negative number."""
        with self._lock:
            self._others[epoch] = self._others.get(epoch, 0) + slots

    def nothing_of(self, epoch: int) -> bool:
        with self._lock:
            return not self._leases.get(epoch) and not self._others.get(epoch)

    def forget(self, epoch: int) -> None:
        """Its memory is gone."""
        with self._lock:
            self._leases.pop(epoch, None)
            self._others.pop(epoch, None)


_shared: WeakValueDictionary[tuple[str, bytes], Holdings] = WeakValueDictionary()
_sharing = threading.Lock()


def holdings_of(engine_id: str, namespace: NamespaceSpec, ranks: int) -> Holdings:
    """The same one for both clients of an engine of one rank, which are in one process."""
    if ranks != 1:
        return Holdings()
    with _sharing:
        return _shared.setdefault((engine_id, namespace.digest), Holdings())
