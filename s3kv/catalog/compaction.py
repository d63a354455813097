"""Folding the log into a snapshot, and deleting what snapshots hold.

Invariants kept here:

* **A snapshot holds what it covers**: every segment and snapshot it names was joined into the index before the index
  was read for it. Anything else stays in the log, also a segment of an earlier time than others that are covered.
* **Only what a listed snapshot covers is deleted**, so at any moment the join of all that is listed holds everything
  that was ever published (but for tombstones past their time). It follows by induction: a snapshot is itself deleted
  only when another covers it. No lease is needed for that: compactors that race, stall for hours, or die anywhere
  leave snapshots that readers join, or cover, like any other fact.
* **Grace.** Deleting waits until the covering snapshot was listed for `grace_s`, by the store's own clock, so that an
  agent that polls has read the segments, or seen the snapshot, by then. Agents look at snapshots three times as often.

The epoch (one more than any listed) fences in the cheap sense: readers take the highest first and skip what it covers,
so what a stalled compactor writes late costs nobody a load, and the next compaction removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from s3kv.catalog import names
from s3kv.catalog.context import Context
from s3kv.catalog.index import Index
from s3kv.catalog.names import Mark
from s3kv.catalog.snapshots import Snapshot, next_epoch, read_header, write_snapshot
from s3kv.catalog.sync import Listed, Synced, fold_marks, split_covers
from s3kv.errors import CorruptData, NotFound
from s3kv.format.limits import MAX_SNAPSHOT_COVERS
from s3kv.format.records import hour_of
from s3kv.format.snapshot import SegmentName, SnapshotHeader

AMORTIZE = 8
"""A snapshot is rewritten when the log has grown to this fraction of it..."""
PATIENCE = 16
"""...or to so many times `compact_after_segments` segments, whichever comes first."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """What one compaction did. `snapshot` is its key, "" when there was nothing to fold."""

    snapshot: str = ""
    folded: int = 0
    deleted: int = 0
    failed: int = 0


def is_due(synced: Synced, after_segments: float) -> bool:
    """Whether folding pays, by what a full listing saw. Rewriting a large snapshot for a few segments would not."""
    if synced.unfolded < after_segments:
        return False
    snapshot_bytes = max((snapshot.meta.size for snapshot in synced.snapshots), default=0)
    return synced.unfolded >= PATIENCE * after_segments or synced.unfolded_bytes * AMORTIZE >= snapshot_bytes


def waits_for_sweep(synced: Synced) -> bool:
    """Whether folded segments are still listed: they go once their snapshot is old enough."""
    return bool(synced.snapshots) and len(synced.log) > synced.unfolded


async def fold(context: Context, index: Index, synced: Synced, time_us: int) -> tuple[Compaction, Snapshot | None]:
    """Writes a snapshot of the index. `synced` is a full listing that was just joined; `time_us` names the snapshot.

    Raises StoreError, IndexUnwritable, IndexDamaged; the bucket holds one whole snapshot more, or none.
    """
    log, snaps, tops = _joined(index, synced)
    unlisted = index.flag("unlisted") is not None
    if synced.unfolded == 0 and tops <= 1 and not unlisted:
        return Compaction(), None
    covers = [*([names.UNLISTED] if unlisted else []), *snaps, *log]
    covers = covers[:MAX_SNAPSHOT_COVERS]
    header = SnapshotHeader(context.spec.digest, time_us, next_epoch(synced.snapshots), 0, tuple(covers))
    drop_before = hour_of(context.clock() - context.tombstone_keep_s)
    meta = await write_snapshot(context, index, header, drop_before)
    name = SegmentName(time_us, names.SNAPSHOT_AGENT, header.epoch)
    folded, folded_snaps = split_covers(header)
    snap_marks = {**fold_marks(folded_snaps), names.packed(name): Mark.APPLIED}
    await context.write(index.apply, (), log=dict.fromkeys(folded, Mark.FOLDED), snaps=snap_marks)
    if unlisted:
        await context.write(index.set_flag, "unlisted", None)
    await context.write(index.prune_tombstones, drop_before)
    context.counters.compactions += 1
    return Compaction(meta.key, len(folded)), Snapshot(name, meta)


def _joined(index: Index, synced: Synced) -> tuple[list[SegmentName], list[SegmentName], int]:
    """The listed segments and snapshots that the index holds, and how many snapshots are covered by no other.

    Unreadable ones are left for `rebuild`."""
    segments = [listed.name for listed in synced.log]
    snapshots = [snapshot.name for snapshot in synced.snapshots]
    log_marks = index.marks("log", map(names.packed, segments))
    snap_marks = index.marks("snaps", map(names.packed, snapshots))
    return (_held(segments, log_marks), _held(snapshots, snap_marks), snap_marks.count(Mark.APPLIED))


def _held(listed: Iterable[SegmentName], marks: Iterable[Mark]) -> list[SegmentName]:
    return [name for name, mark in zip(listed, marks, strict=True) if mark in (Mark.APPLIED, Mark.FOLDED)]


async def sweep(context: Context, synced: Synced, newest: Snapshot | None) -> tuple[int, int]:
    """Deletes what snapshots older than the grace period cover. Returns (deleted, failed); raises StoreError."""
    snapshots = [*synced.snapshots, *([newest] if newest is not None else [])]
    now_s = _store_now(snapshots, synced.log)
    covered: set[bytes] = set()
    for snapshot in snapshots:
        if now_s - snapshot.meta.modified >= context.grace_s:
            covered |= await _covered_by(context, snapshot)
    keys = [listed.key for listed in synced.log if names.packed(listed.name) in covered]
    keys += [snapshot.meta.key for snapshot in snapshots if snapshot.packed in covered]
    if not keys:
        return 0, 0
    failures = await context.store.delete(keys)
    return len(keys) - len(failures), len(failures)


def _store_now(snapshots: Iterable[Snapshot], log: Sequence[Listed]) -> float:
    """The store's clock, at least: this node's may be wrong by any amount."""
    times = [snapshot.meta.modified for snapshot in snapshots] + [listed.modified for listed in log]
    return max(times, default=0.0)


async def _covered_by(context: Context, snapshot: Snapshot) -> set[bytes]:
    try:
        log, snaps = split_covers(await read_header(context, snapshot))
    except (NotFound, CorruptData):
        return set()
    return {*log, *snaps}
