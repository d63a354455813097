"""One round of collection from the bucket to the plan: what commands and the sidecar share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from s3kv.catalog.browse import temporary_catalog
from s3kv.catalog.catalog import Catalog
from s3kv.errors import CorruptData, NotFound
from s3kv.format.keys import lease_key
from s3kv.format.records import ChunkAdded
from s3kv.gc.execute import Place
from s3kv.gc.lease import MAX_LEASE_BYTES, LeaseState
from s3kv.gc.merge import Merge, carry_out, plan_merges
from s3kv.gc.plan import Orphan, Plan, Policy, Source, make_plan
from s3kv.gc.scan import Scan, scan_chunks
from s3kv.identity import NamespaceSpec
from s3kv.settings import Settings
from s3kv.store import Store

LEASE_NAME = "gc"
MERGES_A_SEGMENT = 256
"""Every agent reads every segment of the log, so a record does not get one of its own."""


@dataclass(slots=True)
class Round:
    """The catalogs of the namespaces in question, opened for this round."""

    store: Store
    settings: Settings
    namespaces: tuple[NamespaceSpec, ...]
    catalogs: dict[str, Catalog] = field(default_factory=dict)

    @property
    def places(self) -> dict[str, Place]:
        return {spec.name: Place(self.catalogs[spec.name], len(spec.groups)) for spec in self.namespaces}

    @property
    def chunks(self) -> int:
        return sum(catalog.stats()["chunks"] for catalog in self.catalogs.values())

    def plan(self, policy: Policy, orphans: Sequence[Orphan]) -> Plan:
        """CPU work of seconds for a million chunks: call it in a thread."""
        sources = [Source(spec.name, self.catalogs[spec.name].iter_chunks) for spec in self.namespaces]
        return make_plan(sources, policy, orphans)

    async def scan(self, *, now: float, progress: Callable[[int], None]) -> dict[str, Scan]:
        """Lists every namespace's objects. Raises StoreError."""
        return {
            spec.name: await scan_chunks(
                self.store,
                spec.name,
                self.catalogs[spec.name],
                orphan_age_s=self.settings.collect.orphan_age_s,
                now=now,
                progress=progress,
            )
            for spec in self.namespaces
        }

    def orphans(self, scans: Mapping[str, Scan], *, unnamed: bool) -> list[Orphan]:
        """What may be deleted of what was listed: nothing that a record names by now; without `unnamed` only what a
        collection forgot."""
        return [
            each
            for name, scan in scans.items()
            for each in [*scan.forgotten, *(scan.orphans if unnamed else ())]
            if self.catalogs[name].chunk(each.chunk_id) is None
        ]

    def merges(self, plan: Plan) -> dict[str, list[Merge]]:
        """Of chunks that stay: what `plan` gives up is not worth merging. CPU work: call it in a thread."""
        target = self.settings.upload.chunk_target_bytes
        going = {row.tobytes() for row in plan.ids}
        return {
            spec.name: plan_merges(
                (each for each in self.catalogs[spec.name].iter_chunks() if each.chunk_id not in going), target
            )
            for spec in self.namespaces
        }

    async def merge(
        self, merges: dict[str, list[Merge]], progress: Callable[[int], None], beat: Callable[[], Awaitable[None]]
    ) -> Merged:
        """Carries merges out; a part that turns out bad is left to `s3kv verify`. `beat` is called between merges.

        Raises StoreError and what `beat` raises; objects whose records were not published yet are orphans then.
        """
        merged = Merged()
        for spec in self.namespaces:
            for start in range(0, len(merges[spec.name]), MERGES_A_SEGMENT):
                batch = merges[spec.name][start : start + MERGES_A_SEGMENT]
                records = [record async for record in self._merged(spec, batch, merged, progress, beat)]
                if records:
                    await self.catalogs[spec.name].publish(records, stamped=True)
        return merged

    async def _merged(
        self,
        spec: NamespaceSpec,
        batch: Sequence[Merge],
        merged: Merged,
        progress: Callable[[int], None],
        beat: Callable[[], Awaitable[None]],
    ) -> AsyncIterator[ChunkAdded]:
        catalog = self.catalogs[spec.name]
        for merge in batch:
            await beat()
            parts = [entry for part in merge.parts if (entry := catalog.chunk(part)) is not None]
            progress(len(merge.parts))
            try:
                if len(parts) < len(merge.parts):
                    raise NotFound("a part was forgotten meanwhile")
                record = await carry_out(self.store, spec, parts)
            except (CorruptData, NotFound):
                merged.bad += 1
                continue
            merged.made += 1
            merged.parts += len(merge.parts)
            yield record


@dataclass(slots=True)
class Merged:
    """`bad`: merges left out because a part was missing or damaged."""

    made: int = 0
    parts: int = 0
    bad: int = 0


@asynccontextmanager
async def opened_round(
    store: Store,
    settings: Settings,
    namespaces: tuple[NamespaceSpec, ...],
    *,
    clock: Callable[[], float] = time.time,  # noqa: TID251 - the default of an injected clock
) -> AsyncIterator[Round]:
    """Catalogs with indexes in temporary folders: what is planned on is what the bucket says now."""
    async with AsyncExitStack() as stack:
        opened = Round(store, settings, namespaces)
        for spec in namespaces:
            catalog = await stack.enter_async_context(temporary_catalog(store, spec, settings.catalog, clock=clock))
            opened.catalogs[spec.name] = catalog
        yield opened


async def interrupted_since(store: Store) -> int:
    """When (µs since 1970) a collection forgot chunks whose objects may not all be gone; 0: none did."""
    try:
        state = LeaseState.decode((await store.get_with_etag(lease_key(LEASE_NAME), MAX_LEASE_BYTES))[0])
    except (NotFound, CorruptData):
        return 0
    return state.pending_us
