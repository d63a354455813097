"""Deleting everything takes everything that s3kv wrote."""

from __future__ import annotations

from pathlib import Path

from support.bucket_fill import SettableClock, chain, filling, small_namespace

from s3kv.format.keys import FORMAT_KEY, lease_key
from s3kv.gc.removal import measure_prefixes, remove
from s3kv.store.memory import MemoryStore

SPEC = small_namespace()


async def test_everything_is_measured_and_removed_and_nothing_else(tmp_path: Path) -> None:
    store = MemoryStore()
    async with filling(store, SPEC, tmp_path, SettableClock()) as filler:
        await filler.put_chunk(chain(SPEC, "a", 2), 0, 2)
    for key in (lease_key("gc"), "s3kv-scratch/doctor-1/object", "scratch/somebody/else"):
        await store.put(key, b"x")
    before = [meta.key async for page in store.list("") for meta in page]
    extents = await measure_prefixes(store, [SPEC.name], everything=True)
    assert sum(each.objects for each in extents) == len(before) - 2  # format.json goes unmeasured
    removed = await remove(store, [SPEC.name], everything=True)
    assert (removed.objects, removed.failures) == (len(before) - 1, [])
    assert FORMAT_KEY in before
    assert [meta.key async for page in store.list("") for meta in page] == ["scratch/somebody/else"]
