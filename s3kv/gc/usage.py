"""How much a bucket holds, how old and how used it is, how it grows, and what that costs a month."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from s3kv.format.keys import chunks_prefix, namespace_prefix
from s3kv.format.records import SECONDS_PER_HOUR
from s3kv.identity import NamespaceSpec
from s3kv.settings import PriceSettings
from s3kv.store import Store

GIB = 1 << 30
DAY_S = 86_400.0
BINS_DAYS = (1, 7, 30, 90)
"""Upper edges of the histograms' bins; the last bin is open."""
BIN_NAMES = ("under a day", "1 to 7 days", "7 to 30 days", "30 to 90 days", "over 90 days")
_BATCH = 8192


@dataclass(slots=True)
class Histogram:
    """Bytes by bin of BIN_NAMES."""

    bytes: list[int] = field(default_factory=lambda: [0] * len(BIN_NAMES))

    def add(self, days: Any, sizes: Any) -> None:
        places = np.searchsorted(BINS_DAYS, days, side="right")
        for place, size in enumerate(np.bincount(places, weights=sizes, minlength=len(BIN_NAMES))):
            self.bytes[place] += int(size)


@dataclass(slots=True)
class Usage:
    """One namespace. `bytes`, `chunks`, `blocks` and `objects` are what the catalog names; `stored_…` is what a listing
    of the bucket found (None: not listed), `catalog_bytes` of it the catalog's own. `added`: bytes of 1, 7, 30 days."""

    namespace: NamespaceSpec
    chunks: int = 0
    blocks: int = 0
    objects: int = 0
    bytes: int = 0
    age: Histogram = field(default_factory=Histogram)
    last_use: Histogram = field(default_factory=Histogram)
    added: dict[int, int] = field(default_factory=lambda: {1: 0, 7: 0, 30: 0})
    objects_added_30d: int = 0
    stored_objects: int | None = None
    stored_bytes: int | None = None
    catalog_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """USD a month: storage of what is there, and puts as many as in the last 30 days."""

    storage: float
    puts: float

    @property
    def total(self) -> float:
        return self.storage + self.puts


def measure(namespace: NamespaceSpec, entries: Iterable[Any], now: float) -> Usage:
    """Usage by the catalog's entries, in one pass and constant memory. `now` in seconds since 1970."""
    usage = Usage(namespace)
    source = iter(entries)
    while batch := list(islice(source, _BATCH)):
        sizes = np.array([entry.size for entry in batch], np.float64)
        added_days = (now - np.array([entry.stamp.time_us for entry in batch]) / 1e6) / DAY_S
        used_days = (now - np.array([entry.touched_hour for entry in batch]) * float(SECONDS_PER_HOUR)) / DAY_S
        usage.chunks += len(batch)
        usage.blocks += sum(len(entry.blocks) for entry in batch)
        usage.objects += sum(len(entry.added.groups) for entry in batch)
        usage.bytes += int(sizes.sum())
        usage.age.add(added_days, sizes)
        usage.last_use.add(used_days, sizes)
        for days in usage.added:
            usage.added[days] += int(sizes[added_days <= days].sum())
        usage.objects_added_30d += sum(
            len(entry.added.groups) for entry, days in zip(batch, added_days, strict=True) if days <= 30
        )
    return usage


async def list_stored(store: Store, usage: Usage) -> None:
    """Counts what the bucket holds of the namespace. Raises StoreError; `usage` is unchanged then."""
    chunks = chunks_prefix(usage.namespace.name)
    objects = total = catalog = 0
    async for page in store.list(namespace_prefix(usage.namespace.name)):
        for meta in page:
            objects += 1
            total += meta.size
            catalog += 0 if meta.key.startswith(chunks) else meta.size
    usage.stored_objects, usage.stored_bytes, usage.catalog_bytes = objects, total, catalog


def cost(usages: Iterable[Usage], price: PriceSettings) -> Cost:
    """By what is stored, where that was listed. A GB of the price table is 2**30 bytes, as AWS counts."""
    listed = list(usages)
    size = sum(usage.bytes if usage.stored_bytes is None else usage.stored_bytes for usage in listed)
    puts = sum(usage.objects_added_30d for usage in listed)
    return Cost(size / GIB * price.storage_gb_month, puts / 1000 * price.put_1000)
