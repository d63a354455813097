"""Which chunks are in use, coarsely: collection needs to know last week from today, not this second from the last."""

from __future__ import annotations

from collections.abc import Iterable

from s3kv.catalog.entry import ChunkEntry
from s3kv.format.records import Touched, hour_of

TOUCH_EVERY_HOURS = 6
FLUSH_AFTER_S = 60.0
FLUSH_AT = 4096
PENDING_MAX = 65_536


class Touches:
    """Touches that wait to be published. At most one a chunk in TOUCH_EVERY_HOURS, PENDING_MAX at a time."""

    def __init__(self) -> None:
        self._pending: dict[bytes, int] = {}
        self._since_s = 0.0

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, entry: ChunkEntry, now_s: float) -> bool:
        """False when there is no room for it."""
        hour = hour_of(now_s)
        if hour < entry.touched_hour + TOUCH_EVERY_HOURS or entry.chunk_id in self._pending:
            return True
        if len(self._pending) >= PENDING_MAX:
            return False
        if not self._pending:
            self._since_s = now_s
        self._pending[entry.chunk_id] = hour
        return True

    def due(self, now_s: float) -> bool:
        return bool(self._pending) and (len(self._pending) >= FLUSH_AT or now_s - self._since_s >= FLUSH_AFTER_S)

    def take(self) -> list[Touched]:
        taken = [Touched(chunk_id, hour) for chunk_id, hour in self._pending.items()]
        self._pending.clear()
        return taken

    def put_back(self, touches: Iterable[Touched]) -> None:
        for touch in touches:
            self._pending.setdefault(touch.chunk_id, touch.hour)
