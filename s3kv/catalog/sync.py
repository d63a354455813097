"""Bringing an index up to what the bucket lists.

The log and the snapshots are facts that may be joined in any order (see `entry.merge`); what was joined is marked. A
poll lists the log from a little before the time up to which it was read: names carry their **writer's** clock, so one
that is written now may be named earlier than one that was read already. `poll_overlap_s` covers clocks that are behind
by no more. A **full listing** at every 20th poll finds the rest (a clock further behind, a put that took minutes), sees
new snapshots, and forgets the marks of what is gone. Nothing is taken for read because of its name's time.

A name too far in the future is not read until its time comes (else one bad clock would push everybody's cursor beyond
all others' names). What cannot be decoded is counted, marked and skipped; what cannot be fetched is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from s3kv.catalog import names
from s3kv.catalog.bulk import BulkLoader
from s3kv.catalog.context import Context, hour_for
from s3kv.catalog.damage import Unread
from s3kv.catalog.entry import US
from s3kv.catalog.index import Index
from s3kv.catalog.names import Mark
from s3kv.catalog.snapshots import Snapshot, list_snapshots, read_blocks, read_header
from s3kv.errors import CorruptData, NotFound, S3kvError, StoreError
from s3kv.format.columns import SnapshotBlock
from s3kv.format.keys import log_prefix, log_start_after, parse_log_key
from s3kv.format.limits import MAX_SEGMENT_BYTES, MAX_SNAPSHOT_COVERS
from s3kv.format.records import ChunkAdded, Record
from s3kv.format.segment import decode_segment
from s3kv.format.snapshot import SegmentName, SnapshotHeader

FETCH_SEGMENTS = 16  # at once
FETCH_BYTES = 32 << 20  # at once, unless one alone is larger


class SnapshotUnusable(S3kvError):
    """A snapshot turned out damaged while it was loaded in bulk. Next: open the index again, it starts empty."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A segment in a listing."""

    name: SegmentName
    key: str
    size: int
    modified: float


@dataclass(slots=True)
class Synced:
    """What one sync did and saw. The last four are filled by full listings only.

    `unread`: what is listed, cannot be joined, and is covered by no snapshot.
    """

    changed: int = 0
    failed: bool = False
    latest_us: int = 0
    earliest_failed_us: int | None = None
    unread: list[Unread] = field(default_factory=list)
    log: list[Listed] = field(default_factory=list)  # oldest first, at most MAX_SNAPSHOT_COVERS
    snapshots: list[Snapshot] = field(default_factory=list)
    unfolded: int = 0
    unfolded_bytes: int = 0


class Syncer:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._bad_snapshots: set[bytes] = set()
        self.wants_full = False
        """A listed segment was gone: a snapshot holds it now."""

    async def sync(self, index: Index, *, full: bool) -> Synced:
        """Reads what `index` lacks. Raises StoreError when a listing fails, IndexUnwritable, IndexDamaged,
        SnapshotUnusable; what was applied until then stays. Single segments that fail set `failed`."""
        synced = Synced()
        if full:
            self.wants_full = False
        # A new index loads a snapshot and then reads the log that it does not cover. Any other reads the log first, so
        # that it need not read a snapshot for the last few segments; what was deleted is in a snapshot by then.
        new = index.is_new
        if full and new:
            await self._sync_snapshots(index, synced)
        await self._sync_log(index, synced, full=full)
        if full and not new:
            await self._sync_snapshots(index, synced)
        if full:
            self._tally(index, synced)
            bad = self._bad_among(index, synced.snapshots)
            synced.unread += [Unread(each.meta.key, each.name.time_us, False, each) for each in bad]
        if full and not synced.failed:
            await self._context.write(index.set_synced, self._context.clock())
        return synced

    @staticmethod
    def _tally(index: Index, synced: Synced) -> None:
        marks = index.marks("log", [names.packed(listed.name) for listed in synced.log])
        unfolded = [listed for listed, mark in zip(synced.log, marks, strict=True) if mark is Mark.APPLIED]
        synced.unfolded = len(unfolded)
        synced.unfolded_bytes = sum(listed.size for listed in unfolded)
        bad = [listed for listed, mark in zip(synced.log, marks, strict=True) if mark is Mark.BAD]
        synced.unread += [Unread(listed.key, listed.name.time_us, False) for listed in bad]

    def _bad_among(self, index: Index, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        bad = [snapshot for snapshot in snapshots if snapshot.packed in self._bad_snapshots]
        marks = index.marks("snaps", [snapshot.packed for snapshot in bad])
        return [snapshot for snapshot, mark in zip(bad, marks, strict=True) if mark is Mark.NONE]

    # The log

    async def _sync_log(self, index: Index, synced: Synced, *, full: bool) -> None:
        previous = names.FIRST_NAME
        cursor_us = index.cursor_us
        overlap_us = int(self._context.settings.poll_overlap_s * US)
        start_us = None if full else max(0, cursor_us - overlap_us)
        async for page in self._list_log(start_us, synced):
            packed = [names.packed(listed.name) for listed in page]
            marks = index.marks("log", packed)
            new = [listed for listed, mark in zip(page, marks, strict=True) if mark is Mark.NONE]
            for batch in _batches(new):
                await self._read_batch(index, batch, synced)
            synced.latest_us = max(synced.latest_us, page[-1].name.time_us)
            if full:
                await self._context.write(index.prune_marks, "log", [previous, *packed], previous, packed[-1])
                previous = packed[-1]
                synced.log.extend(page[: max(0, MAX_SNAPSHOT_COVERS - len(synced.log))])
        floor_us = synced.latest_us if synced.earliest_failed_us is None else synced.earliest_failed_us - 1
        if (reached := min(synced.latest_us, floor_us)) > cursor_us:
            await self._context.write(index.apply, (), cursor_us=reached)

    async def _list_log(self, start_us: int | None, synced: Synced) -> AsyncIterator[list[Listed]]:
        context = self._context
        after = None if start_us is None else log_start_after(context.spec.name, start_us)
        async for page in context.store.list(log_prefix(context.spec.name), after):
            segments = []
            for meta in page:
                key = parse_log_key(meta.key)
                name = names.of_segment(key) if key is not None else None
                if name is None:
                    continue
                if context.trusts(name.time_us, meta.modified):
                    segments.append(Listed(name, meta.key, meta.size, meta.modified))
                else:
                    context.counters.segments_deferred += 1
                    synced.unread.append(Unread(meta.key, name.time_us, True))
            if segments:
                yield segments

    async def _read_batch(self, index: Index, batch: Sequence[Listed], synced: Synced) -> None:
        bodies = await asyncio.gather(*(self._fetch(listed, synced) for listed in batch))
        read = [(listed.name, body) for listed, body in zip(batch, bodies, strict=True) if body is not None]
        if read:
            synced.changed += await self._context.write(self._apply_segments, index, read)

    async def _fetch(self, listed: Listed, synced: Synced) -> bytes | None:
        """The segment's bytes; b"" for one that is not a segment; None when it may be read another time."""
        try:
            return await self._context.store.get(listed.key, MAX_SEGMENT_BYTES)
        except CorruptData:
            return b""
        except NotFound:
            self.wants_full = True  # folded and deleted between listing and reading
        except StoreError:
            self._context.counters.segments_failed += 1
            synced.failed = True
            earliest = synced.earliest_failed_us
            synced.earliest_failed_us = listed.name.time_us if earliest is None else min(earliest, listed.name.time_us)
        return None

    def _apply_segments(self, index: Index, read: Sequence[tuple[SegmentName, bytes]]) -> int:
        marks: dict[bytes, Mark] = {}
        records: list[tuple[Record, int]] = []
        for name, body in read:
            decoded = self._decode(name, body)
            marks[names.packed(name)] = Mark.BAD if decoded is None else Mark.APPLIED
            records.extend(decoded or ())
        return index.apply(records, log=marks)

    def _decode(self, name: SegmentName, body: bytes) -> list[tuple[Record, int]] | None:
        context = self._context
        try:
            segment = decode_segment(body, expect_namespace=context.spec.digest)
        except CorruptData:
            context.counters.segments_bad += 1
            return None
        context.counters.segments_read += 1
        admission = context.admission
        admitted = [record for record in segment.records if admission.admits(record, name.time_us)]
        context.counters.records_rejected += len(segment.records) - len(admitted) + segment.skipped
        return [(record, hour_for(record, name.time_us)) for record in admitted]

    # Snapshots

    async def _sync_snapshots(self, index: Index, synced: Synced) -> None:
        """Joins what the listed snapshots hold and the index may lack, newest first.

        A snapshot need not be read when another that was joined covers it, or when all that it covers was joined:
        its contents are the join of what it covers.
        """
        synced.snapshots, ahead = await list_snapshots(self._context)
        synced.unread += [Unread(each.meta.key, each.name.time_us, True, each) for each in ahead]
        listed = [snapshot.packed for snapshot in synced.snapshots]
        last = b"\xff" * names.NAME_BYTES
        await self._context.write(index.prune_marks, "snaps", listed, names.FIRST_NAME, last)
        covered: set[bytes] = set()
        for snapshot in synced.snapshots:
            if index.marks("snaps", [snapshot.packed])[0] is not Mark.NONE or snapshot.packed in self._bad_snapshots:
                continue
            if snapshot.packed in covered:
                await self._context.write(index.apply, (), snaps={snapshot.packed: Mark.FOLDED})
                continue
            try:
                covered |= await self._join(index, snapshot, synced)
            except NotFound:
                self.wants_full = True
            except CorruptData:
                self._bad_snapshots.add(snapshot.packed)
                self._context.counters.snapshots_bad += 1

    async def _join(self, index: Index, snapshot: Snapshot, synced: Synced) -> set[bytes]:
        """Returns the snapshots that it covers."""
        header = await read_header(self._context, snapshot)
        log, snaps = split_covers(header)
        known = index.marks("log", log) + index.marks("snaps", snaps)
        marks = dict.fromkeys(log, Mark.FOLDED)
        snap_marks = {**fold_marks(snaps), snapshot.packed: Mark.APPLIED}
        if Mark.NONE in known or Mark.BAD in known:
            empty = index.is_new and not index.packed(b"", 1)
            synced.changed += await (self._load if empty else self._merge)(index, snapshot, marks, snap_marks)
            self._context.counters.snapshots_read += 1
        else:
            await self._context.write(index.apply, (), log=marks, snaps=snap_marks)
        return set(snaps)

    async def _load(self, index: Index, snapshot: Snapshot, log: dict[bytes, Mark], snaps: dict[bytes, Mark]) -> int:
        context = self._context
        loader = await context.write(BulkLoader, index, context.admission, snapshot.name.time_us)
        try:
            async for blocks in read_blocks(context, snapshot):
                for block in blocks:
                    await context.write(loader.add, block)
            counts = await context.write(loader.finish, log, snaps)
        except CorruptData as error:
            self._bad_snapshots.add(snapshot.packed)
            context.counters.snapshots_bad += 1
            raise SnapshotUnusable(f"snapshot {snapshot.meta.key} is damaged: {error}") from error
        finally:
            loader.abandon()
        context.counters.records_rejected += loader.rejected
        return counts.chunks + counts.tombstones

    async def _merge(self, index: Index, snapshot: Snapshot, log: dict[bytes, Mark], snaps: dict[bytes, Mark]) -> int:
        changed = 0
        async for blocks in read_blocks(self._context, snapshot):
            for block in blocks:
                changed += await self._context.write(self._merge_block, index, block, snapshot.name.time_us)
        return changed + await self._context.write(index.apply, (), log=log, snaps=snaps)

    def _merge_block(self, index: Index, block: SnapshotBlock, source_us: int) -> int:
        admission = self._context.admission
        latest_hour = admission.latest_hour(source_us)
        good = admission.admitted_rows(block, source_us).tolist()
        self._context.counters.records_rejected += good.count(False)
        entries = (entry for entry, admitted in zip(block.entries(), good, strict=True) if admitted)
        hours = ((record, min(hour, latest_hour)) for record, hour in entries)
        return index.apply(
            (record, hour if isinstance(record, ChunkAdded) or hour else hour_for(record, source_us))
            for record, hour in hours
        )


def split_covers(header: SnapshotHeader) -> tuple[list[bytes], list[bytes]]:
    """The packed names of the segments and of the snapshots that a snapshot holds."""
    log = [names.packed(name) for name in header.covers if name.agent != names.SNAPSHOT_AGENT]
    snaps = [names.packed(name) for name in header.covers if name.agent == names.SNAPSHOT_AGENT]
    return log, snaps


def fold_marks(snaps: Iterable[bytes]) -> dict[bytes, Mark]:
    """Marks for covered snapshots. UNLISTED stands for what no reader may take for joined."""
    return {name: Mark.FOLDED for name in snaps if name != names.packed(names.UNLISTED)}


def _batches(new: Iterable[Listed]) -> Iterator[list[Listed]]:
    batch: list[Listed] = []
    size = 0
    for listed in new:
        if batch and (len(batch) == FETCH_SEGMENTS or size + listed.size > FETCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(listed)
        size += listed.size
    if batch:
        yield batch
