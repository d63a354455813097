"""Stamps and names of one agent: they rise, whatever its clock does."""

from __future__ import annotations

from s3kv.catalog.context import Context
from s3kv.catalog.entry import Entry
from s3kv.format.records import Stamp


class Stamps:
    """Not thread-safe."""

    def __init__(self, context: Context, agent_id: int) -> None:
        self._context = context
        self._agent_id = agent_id
        self._last_us = 0

    def tick(self) -> int:
        """The time by this node's clock, but after all that was written here or read from the log."""
        self._last_us = max(self._context.now_us(), self._last_us + 1)
        return self._last_us

    def saw(self, time_us: int) -> None:
        """A name that was read from the log."""
        self._last_us = max(self._last_us, time_us)

    def new(self, known: Entry | None) -> Stamp:
        """One that outdoes what is known of the chunk."""
        return self.at(self.tick(), known)

    def at(self, time_us: int, known: Entry | None) -> Stamp:
        """One of that time, or the next one that outdoes what is known of the chunk."""
        return Stamp(max(time_us, 0 if known is None else known.stamp.time_us + 1), self._agent_id)
