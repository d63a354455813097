"""Deleting whole namespaces, or everything under the prefix that s3kv wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from s3kv.format.keys import FORMAT_KEY, LEASES_PREFIX, namespace_key, namespace_prefix
from s3kv.store import DeleteError, Store
from s3kv.store.base import DELETE_BATCH_KEYS
from s3kv.store.keys import SCRATCH_PREFIX

_BESIDE = (LEASES_PREFIX, SCRATCH_PREFIX)


@dataclass(frozen=True, slots=True)
class Extent:
    """What is under one prefix."""

    prefix: str
    objects: int
    bytes: int


@dataclass(slots=True)
class Removed:
    objects: int = 0
    failures: list[DeleteError] = field(default_factory=list)


async def measure_prefixes(store: Store, namespaces: Sequence[str], *, everything: bool) -> list[Extent]:
    """What `remove` would delete, by prefix. Raises StoreError."""
    extents = []
    for prefix in [*map(namespace_prefix, namespaces), *(_BESIDE if everything else ())]:
        objects = total = 0
        async for page in store.list(prefix):
            objects += len(page)
            total += sum(meta.size for meta in page)
        extents.append(Extent(prefix, objects, total))
    return extents


async def remove(
    store: Store,
    namespaces: Sequence[str],
    *,
    everything: bool,
    progress: Callable[[int], None] = lambda count: None,
) -> Removed:
    """Deletes namespaces (names) and, with `everything`, leases, what stores were tried with, and `format.json`.

    The description goes last: while anything of a namespace is left it is still listed as one, and may be deleted
    again. Raises StoreError; what was not reached stays.
    """
    removed = Removed()
    for name in namespaces:
        await _remove_prefix(store, namespace_prefix(name), namespace_key(name), removed, progress)
        if not removed.failures:
            await _delete(store, [namespace_key(name)], removed)
    if everything:
        for prefix in _BESIDE:
            await _remove_prefix(store, prefix, "", removed, progress)
        await _delete(store, [FORMAT_KEY], removed)
    return removed


async def _remove_prefix(
    store: Store, prefix: str, keep: str, removed: Removed, progress: Callable[[int], None]
) -> None:
    batch: list[str] = []
    async for page in store.list(prefix):
        batch += [meta.key for meta in page if meta.key != keep]
        while len(batch) >= DELETE_BATCH_KEYS:
            await _delete(store, batch[:DELETE_BATCH_KEYS], removed)
            progress(DELETE_BATCH_KEYS)
            del batch[:DELETE_BATCH_KEYS]
    if batch:
        await _delete(store, batch, removed)
        progress(len(batch))


async def _delete(store: Store, keys: list[str], removed: Removed) -> None:
    failures = await store.delete(keys)
    removed.failures += failures
    removed.objects += len(keys) - len(failures)
