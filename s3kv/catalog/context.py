"""What the parts of one catalog share: where it lives, what is believed, what is counted, how work leaves the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from s3kv.catalog.admission import Admission
from s3kv.catalog.entry import US
from s3kv.format.records import ChunkDeleted, Record, hour_of
from s3kv.identity import NamespaceSpec
from s3kv.settings import CatalogSettings
from s3kv.store import Store

T = TypeVar("T")
P = ParamSpec("P")

TOMBSTONE_KEEP_S = 86_400.0
"""How long tombstones are kept at least: an agent that was away for longer loads its index again at the next start."""


@dataclass(slots=True)
class Counters:
    """Since this catalog was opened; they only rise."""

    polls: int = 0
    poll_failures: int = 0
    full_listings: int = 0
    segments_read: int = 0
    segments_bad: int = 0
    segments_failed: int = 0
    segments_deferred: int = 0
    snapshots_read: int = 0
    snapshots_bad: int = 0
    records_rejected: int = 0
    records_published: int = 0
    chunks_forgotten: int = 0
    touches_dropped: int = 0
    index_unwritable: int = 0
    index_damaged: int = 0
    compactions: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """One namespace's catalog, as one agent sees it. `writer` runs what changes the index, one thing at a time."""

    store: Store
    spec: NamespaceSpec
    settings: CatalogSettings
    clock: Callable[[], float]
    grace_s: float
    writer: Executor
    counters: Counters = field(default_factory=Counters)

    @property
    def admission(self) -> Admission:
        skew_us = int(self.settings.max_clock_skew_s * US)
        return Admission(self.spec.digest, len(self.spec.groups), skew_us)

    @property
    def tombstone_keep_s(self) -> float:
        return max(TOMBSTONE_KEEP_S, 2 * self.grace_s)

    def now_us(self) -> int:
        return max(0, int(self.clock() * US))

    def trusts(self, time_us: int, modified_s: float) -> bool:
        """Whether a name of that time is believed. A name in the future is left alone until its time comes.

        The store's clock, which `modified_s` is of, judges alike on every agent, also where this node's is behind.
        """
        return time_us <= int((max(self.clock(), modified_s) + self.settings.max_clock_skew_s) * US)

    async def write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `work` where the index is written. When this is cancelled the work still ends, in its turn."""
        return await asyncio.get_running_loop().run_in_executor(self.writer, lambda: work(*args, **kwargs))

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `work`, which only reads the index, in some other thread."""
        return await asyncio.get_running_loop().run_in_executor(None, lambda: work(*args, **kwargs))


def hour_for(record: Record, source_us: int) -> int:
    """The hour that goes with a record from a segment of that time; see `entry.merge`."""
    return hour_of(source_us / US) if isinstance(record, ChunkDeleted) else 0
