"""What a run leaves in the bucket and on disk, looked at from outside once every process has ended.

- Every object's key is one of format 1; every chunk object decodes with every checksum right, unless the run itself
  damaged it; every log segment and snapshot decodes.
- Every record of the catalog has its objects; where objects were taken away behind everybody's back, or a collector was
  at work, a record without one is a miss, and is counted.
- No raw salt in any key, object, log or metric.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import chaos_harm as harm
from s3kv.catalog.browse import find_namespaces, temporary_catalog
from s3kv.errors import ConfigError
from s3kv.format import keys
from s3kv.gc.inspect import inspect_key
from s3kv.gc.verify import verify_chunks
from s3kv.settings import CatalogSettings
from s3kv.store.base import Store
from s3kv.store.keys import SCRATCH_PREFIX
from s3kv.store.opening import open_unguarded

if TYPE_CHECKING:
    from benchmarks.chaos_run import ChaosRun

TAKERS = ("delete_object", "flip_object", "cut_object", "collect", "merge", "collector_kill", "collector_stop")
MAX_OBJECT_BYTES = 64 << 20


def audit(run: ChaosRun) -> None:
    """Adds what is wrong to the run's problems."""
    harm.run_now(_audit(run, open_unguarded(run.direct)), 60.0)
    for path in sorted(Path(run.folder).glob("*.log")) + sorted(Path(run.folder).glob("metrics*.txt")):
        _search(run, path.name, path.read_bytes())


async def _audit(run: ChaosRun, store: Store) -> None:
    try:
        await _objects(run, store)
        await _records(run, store)
    finally:
        await store.close()


async def _objects(run: ChaosRun, store: Store) -> None:
    listed = [meta async for page in store.list("") for meta in page]
    run.outcome.notes["objects"] += len(listed)
    for meta in listed:
        data = await store.get(meta.key, MAX_OBJECT_BYTES)
        _search(run, meta.key, meta.key.encode() + data)
        if meta.key.startswith(
            SCRATCH_PREFIX
        ):  # whether the store honours conditions was asked, and the asker was killed
            run.outcome.notes["probes left behind"] += 1
            continue
        try:
            found = await inspect_key(store, meta.key)
        except ConfigError as error:
            run.problem(f"a strange key: {error}")
            continue
        if found.problem and meta.key in run.bucket.damaged:
            run.outcome.notes["damaged objects that nobody read again"] += 1
        elif found.problem:
            run.problem(f"{meta.key}: {found.problem}")


async def _records(run: ChaosRun, store: Store) -> None:
    excused = any(run.outcome.faults[kind] for kind in TAKERS)
    for spec in (await find_namespaces(store)).namespaces:
        async with temporary_catalog(store, spec, CatalogSettings(map_bytes=1 << 26)) as catalog:
            entries = list(catalog.iter_chunks())
            run.outcome.notes["catalog records"] += len(entries)
            named = {entry.chunk_id for entry in entries}
            async for verdict in verify_chunks(store, spec, entries, concurrency=4):
                if verdict.good:
                    continue
                if excused:
                    run.outcome.notes["records that are misses"] += 1
                else:
                    run.problem(f"the record of chunk {verdict.chunk_id.hex()} is bad: {verdict.detail}")
        parsed = [keys.parse_chunk_key(key) for key in await run_keys(store)]
        orphans = {each.chunk_id for each in parsed if each is not None} - named
        run.outcome.notes["chunks without a record"] += len(orphans)


async def run_keys(store: Store) -> list[str]:
    return [meta.key async for page in store.list("ns/") for meta in page]


def _search(run: ChaosRun, where: str, data: bytes) -> None:
    secrets: tuple[Any, ...] = run.plan.salts
    for secret in secrets:
        if secret.encode() in data:
            run.problem(f"a raw salt is in {where}")
