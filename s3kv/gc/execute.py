"""Carrying a plan out: publish, wait, check again, delete.

The order, and why no reader or writer is ever harmed:

1. Deletions are published, dependents first. From now on no agent that has read the log offers or fetches the chunks.
2. Grace: agents that have not polled yet do so; fetches in flight end.
3. Before each batch the catalog is read again. A chunk that somebody stored again meanwhile has a newer record, and
   stays.
4. Objects go in batches, in the same order. A writer that finds the object there just before it goes and publishes just
   after has made a record without an object: a miss, which the first reader repairs (invariant 4 of the architecture).

Stopped anywhere, what was published is forgotten and its objects are garbage, never the reverse. The lease remembers
(`pending_us`) that such objects may exist; the next run finds them by listing and goes on (`s3kv.gc.scan`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from s3kv.format.keys import chunk_key
from s3kv.format.records import DeleteReason
from s3kv.gc.lease import Heartbeat, Lease
from s3kv.gc.plan import Plan, Reason
from s3kv.store import DeleteError, Store
from s3kv.store.base import DELETE_BATCH_KEYS

PUBLISH_CHUNKS = 10_000
GRACE_STEP_S = 1.0
"""How often a person who waits hears of it."""
_US = 1_000_000
_REASONS = {Reason.SUPERSEDED: DeleteReason.REPLACED}


class CatalogOf(Protocol):
    """What execution needs of one namespace's catalog."""

    def chunk(self, chunk_id: bytes) -> Any | None: ...
    @property
    def unread(self) -> int: ...
    async def catch_up(self) -> object: ...
    async def forget(self, chunk_ids: Sequence[bytes], reason: DeleteReason) -> int: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace to collect in, and how many layer groups (objects a chunk) it has."""

    catalog: CatalogOf
    groups: int


@dataclass(slots=True)
class Outcome:
    """`kept`: stored again by somebody during the grace period, or orphans of a catalog that cannot be read any more.
    `failures`: keys that are still there."""

    published: int = 0
    chunks: int = 0
    objects: int = 0
    bytes: int = 0
    kept: int = 0
    failures: list[DeleteError] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pace:
    """Times in seconds. `clock` is monotonic, `wall_clock` since 1970; `resumed`: the grace period is long over."""

    grace_s: float
    lease_s: float
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    resumed: bool = False
    settles: bool = True
    """Nothing that an earlier collection forgot is left once this plan is carried out."""


@dataclass(slots=True)
class Progress:
    """Called with how much was done since the last time."""

    published: Callable[[int], None] = lambda count: None
    waited: Callable[[float], None] = lambda seconds: None
    deleted: Callable[[int], None] = lambda count: None


async def execute(
    plan: Plan,
    places: Mapping[str, Place],
    store: Store,
    lease: Lease,
    pace: Pace,
    progress: Progress | None = None,
) -> Outcome:
    """Carries `plan` out under `lease`. Raises LeaseLost (stop: somebody else collects) and StoreError.

    May be cancelled at any point; see the module for what that leaves behind.
    """
    run = _Run(plan, places, store, lease, pace, progress or Progress())
    await lease.renew(pending_us=lease.state.pending_us or int(pace.wall_clock() * _US))
    await run.publish()
    if run.outcome.published or not pace.resumed:
        await run.wait()
    await run.delete()
    if pace.settles and not run.outcome.failures:
        await lease.renew(pending_us=0)
    return run.outcome


class _Run:
    def __init__(
        self,
        plan: Plan,
        places: Mapping[str, Place],
        store: Store,
        lease: Lease,
        pace: Pace,
        progress: Progress,
    ) -> None:
        self.outcome = Outcome()
        self._plan = plan
        self._places = places
        self._store = store
        self._pace = pace
        self._progress = progress
        self._beat = Heartbeat(lease, pace.lease_s, pace.clock)

    async def publish(self) -> None:
        for namespace, reason, ids in self._batches(PUBLISH_CHUNKS):
            await self._beat()
            if reason is not Reason.ORPHAN:  # a record that names one by now is of somebody who stored it meanwhile
                code = _REASONS.get(reason, DeleteReason.COLLECTED)
                self.outcome.published += await self._places[namespace].catalog.forget(ids, code)
            self._progress.published(len(ids))

    async def wait(self) -> None:
        left = self._pace.grace_s
        while left > 0:
            step = min(left, self._pace.lease_s / 3, GRACE_STEP_S)
            await self._pace.sleep(step)
            await self._beat()
            self._progress.waited(step)
            left -= step

    async def delete(self) -> None:
        sizes = _Sizes(self._plan)
        for namespace, reason, ids in self._batches(DELETE_BATCH_KEYS, per_object=True):
            await self._beat()
            place = self._places[namespace]
            await place.catalog.catch_up()
            unsure = reason is Reason.ORPHAN and place.catalog.unread > 0
            going = [chunk_id for chunk_id in ids if not unsure and place.catalog.chunk(chunk_id) is None]
            self.outcome.kept += len(ids) - len(going)
            keys = [chunk_key(namespace, chunk_id, group) for chunk_id in going for group in range(place.groups)]
            failures = await self._store.delete(keys)
            self.outcome.failures += failures
            failed = {failure.key.rpartition("/")[0] for failure in failures}
            gone = [chunk for chunk in going if chunk_key(namespace, chunk, 0).rpartition("/")[0] not in failed]
            self.outcome.chunks += len(gone)
            self.outcome.objects += len(keys) - len(failures)
            self.outcome.bytes += sum(map(sizes.of, gone))
            self._progress.deleted(len(ids))

    def _batches(self, count: int, *, per_object: bool = False) -> Iterator[tuple[str, Reason, list[bytes]]]:
        """Runs of the plan, in its order, of one namespace and reason each; at most `count` chunks or objects."""
        plan = self._plan
        start = 0
        while start < len(plan):
            kind = plan.namespace[start], plan.reason[start]
            namespace = plan.namespaces[int(kind[0])]
            limit = max(1, count // self._places[namespace].groups) if per_object else count
            end = start + 1
            while end < len(plan) and end - start < limit and (plan.namespace[end], plan.reason[end]) == kind:
                end += 1
            yield namespace, Reason(int(kind[1])), [row.tobytes() for row in plan.ids[start:end]]
            start = end


class _Sizes:
    """Bytes of a chunk of the plan, by id; the ids come in the plan's order, so each is looked for from the last on."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._row = 0

    def of(self, chunk_id: bytes) -> int:
        while self._plan.ids[self._row].tobytes() != chunk_id:
            self._row += 1
        return int(self._plan.size[self._row])
