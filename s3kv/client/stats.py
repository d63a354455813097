"""Counters of the engine's side, by reason; every trouble of the world ends in one of them."""

from __future__ import annotations

import logging
import threading
from collections import Counter

logger = logging.getLogger("s3kv.client")


class Counts:
    """Thread-safe counts by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, name: str, amount: int = 1) -> int:
        """Adds and returns the new total."""
        with self._lock:
            self._counts[name] += amount
            return self._counts[name]

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class ClientStats(Counts):
    """The first trouble of each reason is logged, later ones only counted."""

    def trouble(self, name: str, detail: object) -> None:
        if self.count(name) == 1:
            logger.warning("%s: %s (further ones are counted, not logged)", name, detail)
