"""One round of collection from the bucket to the plan: what commands and the sidecar share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from s3kv.catalog.browse import temporary_catalog
from s3kv.catalog.catalog import Catalog
from s3kv.errors import CorruptData, NotFound
from s3kv.format.keys import lease_key
from s3kv.gc.execute import Place
from s3kv.gc.lease import MAX_LEASE_BYTES, LeaseState
from s3kv.gc.merge import Merge, carry_out, plan_merges
from s3kv.gc.plan import Orphan, Plan, Policy, Source, make_plan
from s3kv.gc.scan import Scan, scan_chunks
from s3kv.identity import NamespaceSpec
from s3kv.settings import Settings
from s3kv.store import Store

LEASE_NAME = "gc"


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

    async def merge(self, merges: dict[str, list[Merge]], progress: Callable[[int], None]) -> Merged:
        """Carries merges out; a part that turns out bad is left to `s3kv verify`. Raises StoreError."""
        merged = Merged()
        for spec in self.namespaces:
            catalog = self.catalogs[spec.name]
            for merge in merges[spec.name]:
                parts = [entry for part in merge.parts if (entry := catalog.chunk(part)) is not None]
                try:
                    if len(parts) < len(merge.parts):
                        raise NotFound("a part was forgotten meanwhile")
                    record = await carry_out(self.store, spec, parts)
                except (CorruptData, NotFound):
                    merged.bad += 1
                    continue
                await catalog.publish([record])
                merged.made += 1
                merged.parts += len(merge.parts)
                progress(len(merge.parts))
        return merged


@dataclass(slots=True)
class Merged:
    """`bad`: merges left out because a part was missing or damaged."""

    made: int = 0
    parts: int = 0
    bad: int = 0


@asynccontextmanager
async def opened_round(store: Store, settings: Settings, namespaces: tuple[NamespaceSpec, ...]) -> AsyncIterator[Round]:
    """Catalogs with indexes in temporary folders: what is planned on is what the bucket says now."""
    async with AsyncExitStack() as stack:
        opened = Round(store, settings, namespaces)
        for spec in namespaces:
            catalog = await stack.enter_async_context(temporary_catalog(store, spec, settings.catalog))
            opened.catalogs[spec.name] = catalog
        yield opened


async def interrupted_since(store: Store) -> float | None:
    """When (seconds since 1970) a collection forgot chunks whose objects may not all be gone; None: none did."""
    try:
        state = LeaseState.decode((await store.get_with_etag(lease_key(LEASE_NAME), MAX_LEASE_BYTES))[0])
    except (NotFound, CorruptData):
        return None
    return state.pending_us / 1e6 if state.pending_us else None
