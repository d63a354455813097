"""The catalog of one namespace: what the bucket holds, as this agent knows it, and how it tells the others.

Invariants kept here:

* **Catalog follows data.** `publish` returns once the segment is durable; its callers publish an add only after every
  object is, and a deletion before any object goes (invariant 6).
* **A miss is always safe.** A lookup never raises and never waits: a missing, damaged or stale index answers less.
* **Exactly what was seen is forgotten.** A deletion carries the stamp of the add that it is about, so an add that was
  made meanwhile, by anybody, survives it.
* **Stamps rise.** An add outdoes every record of its chunk that this agent knows, and names of segments follow the
  latest that it has read: an agent whose clock is behind writes in order all the same.

Everything here runs on one event loop; what touches the disk runs in one thread of its own, in turn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from s3kv.catalog.announce import announce
from s3kv.catalog.compaction import Compaction, fold, is_due, sweep, waits_for_sweep
from s3kv.catalog.context import Context, hour_for
from s3kv.catalog.damage import Unread, hopeless
from s3kv.catalog.entry import ChunkEntry, Location, Tombstone, is_stored, unpack
from s3kv.catalog.faults import IndexDamaged, IndexUnwritable
from s3kv.catalog.index import Index
from s3kv.catalog.names import SNAPSHOT_AGENT, Mark, packed
from s3kv.catalog.rebuild import Rebuilt, rebuild
from s3kv.catalog.segments import SegmentWriter, split_records
from s3kv.catalog.stamps import Stamps
from s3kv.catalog.sync import SnapshotUnusable, Synced, Syncer
from s3kv.catalog.touches import Touches
from s3kv.errors import ConfigError, StoreError, Transient
from s3kv.format.records import ChunkAdded, ChunkDeleted, DeleteReason, Record, Stamp
from s3kv.format.snapshot import SegmentName
from s3kv.identity import NamespaceSpec
from s3kv.settings import CatalogSettings
from s3kv.store import Store

FULL_EVERY = 20
"""Every so many polls list the whole log: see `sync`."""
RESTART_PAUSE_S = 30.0
"""Between tries to make the index again, or to write to a full one: each reads what could not be kept, anew."""
HIDDEN_MAX = 65_536


class Catalog:
    """See the module. `index_dir` is the node's folder of indexes; this one's is named by the namespace.

    `agent_id` is a u32 that no other living agent has. `clock` gives seconds since 1970. `grace_s` is how long folded
    segments and snapshots stay in the bucket; it must be the same for all agents, or longer here than theirs.
    """

    def __init__(
        self,
        store: Store,
        namespace: NamespaceSpec,
        index_dir: Path,
        *,
        agent_id: int,
        clock: Callable[[], float],
        settings: CatalogSettings,
        grace_s: float = 300.0,
        rng: random.Random | None = None,
    ) -> None:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="s3kv-catalog")
        self._context = Context(store, namespace, settings, clock, grace_s, self._writer)
        self._folder = index_dir / namespace.name
        self._agent_id = agent_id % SNAPSHOT_AGENT
        self._syncer = Syncer(self._context)
        self._index: Index | None = None
        self.announced = asyncio.Event()
        """Set once the bucket's prefix is known to be of this format and namespace: nothing may be put there before."""
        self._syncing = asyncio.Lock()
        self._stamps = Stamps(self._context, self._agent_id)
        self._segments = SegmentWriter(self._context, self._agent_id)
        self._touches = Touches()
        self._polls = 0
        self._last_full_s: float | None = None
        self._unread: list[Unread] = []
        self._wants_compaction = False
        self._unwritable = False
        self._damaged = False
        self._published_unseen = False
        self._hidden: set[bytes] = set()
        self._retry_s = 0.0
        rng = rng or random.Random(agent_id)
        # Agents that see the same log fill up should not all fold it at once.
        self._compact_after = settings.compact_after_segments * rng.uniform(1.0, 2.0)

    # ---- life

    async def open(self) -> None:
        """Makes the namespace known, opens the index and joins all that is listed. May be called again when it raised.

        Raises ConfigError (the prefix is of another format, the folder cannot be used, the store refuses), StoreError
        and IndexUnwritable (try again; until then lookups find nothing and publishing works).
        """
        async with self._syncing:
            if self._index is None:
                await self._start()

    async def _start(self) -> None:
        identity = await announce(self._context.store, self._context.spec)
        self.announced.set()
        while self._index is None:
            map_bytes = self._context.settings.map_bytes
            index = await self._context.write(Index.open, self._folder, identity, map_bytes=map_bytes)
            away_s = self._context.clock() - index.synced_s
            if not index.is_new and away_s > self._context.tombstone_keep_s:
                # Tombstones of that time may be gone from the bucket: what they hid would be found here for ever.
                await self._context.write(index.destroy)
                continue
            try:
                self._published_unseen = True
                while self._published_unseen:  # what is published while the log is listed may not be in the list
                    self._published_unseen = False
                    await self._sync(index, full=True)
            except SnapshotUnusable:
                await self._context.write(index.close, clean=False)
                continue
            except BaseException:
                await self._context.write(index.close, clean=False)
                raise
            self._index = index

    async def close(self) -> None:
        """Lets go of the index, synced, so that it also outlives a reboot. Nothing is published. May be repeated."""
        index, self._index = self._index, None
        if index is not None:
            await self._context.write(index.close)
        self._writer.shutdown(wait=False)

    # ---- reading: never raises, never waits

    def lookup(self, hashes: Sequence[bytes]) -> list[Location]:
        """Locations of the longest prefix of `hashes` that is stored; `[]` while there is no index."""
        if self._index is None:
            return []
        try:
            found = self._index.lookup(hashes)
        except IndexDamaged:
            self._note_damage()
            return []
        if self._hidden:
            hidden = (at for at, place in enumerate(found) if place.chunk_id in self._hidden)
            found = found[: next(hidden, len(found))]
        return found

    @property
    def readable(self) -> bool:
        """False while `lookup` finds nothing for want of an index: not open yet, or a damaged one is made again."""
        return self._index is not None and not self._damaged

    def chunk(self, chunk_id: bytes) -> ChunkEntry | None:
        """The entry of a stored chunk."""
        entry = self._get(chunk_id)
        return entry if isinstance(entry, ChunkEntry) else None

    def tombstone(self, chunk_id: bytes) -> Tombstone | None:
        """What is known of a chunk that was forgotten and not stored again."""
        entry = self._get(chunk_id)
        return entry if isinstance(entry, Tombstone) else None

    def is_forgotten(self, chunk_id: bytes) -> bool:
        return self.tombstone(chunk_id) is not None

    def _get(self, chunk_id: bytes) -> ChunkEntry | Tombstone | None:
        if self._index is None:
            return None
        try:
            return self._index.get(chunk_id)
        except IndexDamaged:
            self._note_damage()
            return None

    def iter_chunks(self) -> Iterator[ChunkEntry]:
        """All stored chunks in order of their ids, read a page at a time: bounded memory, any thread, and what changes
        meanwhile is seen in either state. Raises IndexDamaged."""
        after = b""
        while self._index is not None and (page := self._index.packed(after, 256)):
            after = page[-1][0]
            for _, value in page:
                entry = unpack(value) if is_stored(value) else None
                if isinstance(entry, ChunkEntry):
                    yield entry

    @property
    def unread(self) -> int:
        """Objects of the log and snapshots that the last full listing saw and that are not known here: damaged, or
        named in the future. What a chunk without a record is cannot be told while there are any."""
        return len(self._unread)

    def stats(self) -> dict[str, Any]:
        """Counts of the index and counters since the start, as plain numbers."""
        counts: dict[str, Any] = {}
        if self._index is not None:
            with suppress(IndexDamaged):
                counts = asdict(self._index.counts())
        state = {"open": self._index is not None, "writable": not self._unwritable}
        waiting = {"touches": len(self._touches), "unread": self.unread}
        return {**counts, **state, **waiting, **asdict(self._context.counters)}

    # ---- telling the others

    def next_stamp(self, chunk_id: bytes) -> Stamp:
        """A stamp that outdoes every record of this chunk that is known here."""
        return self._stamps.new(self._get(chunk_id))

    async def publish(self, records: Sequence[Record], *, stamped: bool = False) -> None:
        """Writes records as segments of the log, adds with stamps of their own, and touches that wait with them.

        `stamped`: adds are as old as their stamps say, as far as these outdo what is known.
        Durable on return, and known here. Raises StoreError; cancelled or failed, each segment was written whole or
        not at all, and publishing again is harmless.
        """
        ready = [self._ready(record, stamped) for record in records]
        touches = self._touches.take()
        try:
            for part in split_records([*ready, *touches]):
                await self._apply_own(await self._segments.write(part, self._stamps.tick), part)
        except BaseException:
            self._touches.put_back(touches)
            raise
        self._context.counters.records_published += len(ready)

    def _ready(self, record: Record, stamped: bool) -> Record:
        if not isinstance(record, ChunkAdded):
            return record
        known = self._get(record.chunk_id)
        time_us = record.stamp.time_us if stamped else self._stamps.tick()
        return replace(record, stamp=self._stamps.at(time_us, known))

    async def _apply_own(self, name: SegmentName, records: Sequence[Record]) -> None:
        index = self._index
        if index is None:
            self._published_unseen = True
            return
        hours = [(record, hour_for(record, name.time_us)) for record in records]
        try:
            await self._context.write(index.apply, hours, log={packed(name): Mark.APPLIED})
        except IndexUnwritable:
            self._note_unwritable()
            self._hide(record.chunk_id for record in records if isinstance(record, ChunkDeleted))
        except IndexDamaged:
            self._note_damage()

    async def forget(self, chunk_ids: Iterable[bytes], reason: DeleteReason) -> int:
        """Publishes deletions of those chunks that are stored, as they are known now. Returns how many.

        Raises StoreError as `publish` does.
        """
        entries = (self.chunk(chunk_id) for chunk_id in dict.fromkeys(chunk_ids))
        records = [ChunkDeleted(entry.chunk_id, entry.stamp, reason) for entry in entries if entry is not None]
        if records:
            await self.publish(records)
            self._context.counters.chunks_forgotten += len(records)
        return len(records)

    def touch(self, chunk_ids: Iterable[bytes]) -> None:
        """Notes that chunks are in use now; published later, in company, and only once in a while for each."""
        now_s = self._context.clock()
        for chunk_id in chunk_ids:
            entry = self.chunk(chunk_id)
            if entry is not None and not self._touches.add(entry, now_s):
                self._context.counters.touches_dropped += 1

    async def flush_touches(self) -> None:
        """Publishes the touches that wait. Raises StoreError; they go on waiting then."""
        if len(self._touches):
            await self.publish(())

    # ---- hearing from the others

    async def poll(self) -> int:
        """Reads what is new in the log. Returns how many records changed something here.

        Costs one listing when nothing is new. Raises StoreError when that fails (try again later); single segments
        that cannot be read are counted, and read by a later poll.
        """
        async with self._syncing:
            self._context.counters.polls += 1
            try:
                return (await self._poll(full=False)).changed
            except StoreError:
                self._context.counters.poll_failures += 1
                raise
            except IndexUnwritable:
                self._note_unwritable()
            except (IndexDamaged, SnapshotUnusable):
                self._note_damage()
            return 0

    async def catch_up(self) -> None:
        """Reads all that can be read, or raises: for who is about to delete objects, and must not miss an add.

        A poll may miss one for a while: a segment that cannot be fetched, or that was named long before it was put.
        What is damaged or named in the future stays `unread`. Raises StoreError, IndexUnwritable, IndexDamaged,
        SnapshotUnusable.
        """
        async with self._syncing:
            synced = await self._poll(full=True)
            if self._index is None or self._unwritable or synced.failed or self._syncer.wants_full:
                raise Transient("the catalog cannot be read completely at the moment; try again")

    async def _poll(self, *, full: bool) -> Synced:
        index = await self._usable_index()
        if index is None:
            return Synced()
        self._polls += 1
        synced = await self._sync(index, full=full or self._full_is_due())
        if self._touches.due(self._context.clock()):
            await self.flush_touches()
        return synced

    async def _usable_index(self) -> Index | None:
        """The index, made again when it was damaged; None while it cannot be written (then nothing is read either:
        it would be read again and again without being kept)."""
        if self._index is not None and (self._damaged or self._was_cut_off()):
            index, self._index = self._index, None
            await self._context.write(index.destroy)
        if self._index is None:
            if self._context.clock() < self._retry_s:
                return None
            self._damaged = False
            self._retry_s = self._context.clock() + RESTART_PAUSE_S
            try:
                await self._start()
            except ConfigError as error:  # at start-up it would be raised; now it is a degraded state
                if isinstance(error, StoreError):
                    raise
                self._context.counters.index_unwritable += 1
                return None
            self._retry_s = 0.0
        if self._unwritable and self._index is not None:
            if self._context.clock() < self._retry_s:
                return None
            await self._context.write(self._index.set_flag, "probe", b"1")
            self._unwritable = False
            self._hidden.clear()
            self._last_full_s = None
        return self._index

    def _was_cut_off(self) -> bool:
        """For so long that tombstones may have come and gone in the bucket: what they hid would be found for ever."""
        last_s = self._last_full_s
        return last_s is not None and self._context.clock() - last_s > self._context.tombstone_keep_s

    async def _sync(self, index: Index, *, full: bool) -> Synced:
        synced = await self._syncer.sync(index, full=full)
        self._stamps.saw(synced.latest_us)
        if full:
            self._last_full_s = self._context.clock()
            self._wants_compaction = is_due(synced, self._compact_after) or waits_for_sweep(synced)
            self._context.counters.full_listings += 1
            self._unread = synced.unread
        return synced

    def _full_is_due(self) -> bool:
        """Also when polls were few: what is listed now may be folded and deleted a grace period from now."""
        if self._last_full_s is None or self._syncer.wants_full or self._polls % FULL_EVERY == 0:
            return True
        return abs(self._context.clock() - self._last_full_s) > self._context.grace_s / 3

    def _note_unwritable(self) -> None:
        self._unwritable = True
        self._retry_s = self._context.clock() + RESTART_PAUSE_S
        self._context.counters.index_unwritable += 1

    def _note_damage(self) -> None:
        self._damaged = True
        self._context.counters.index_damaged += 1

    def _hide(self, chunk_ids: Iterable[bytes]) -> None:
        """What is forgotten while the index cannot be written; a bounded stand-in for its tombstones."""
        self._hidden.update(chunk_ids)
        while len(self._hidden) > HIDDEN_MAX:
            self._hidden.pop()

    # ---- upkeep

    def wants_compaction(self) -> bool:
        """Whether the last full listing saw enough to fold, or something that waits to be deleted."""
        return self._wants_compaction and self._index is not None and not self._unwritable

    async def compact(self, *, force: bool = False) -> Compaction:
        """Folds the log into a snapshot when that is due, or anyway with `force`, and deletes what older ones hold.

        Any number of agents may do so at once. Raises StoreError, IndexUnwritable, IndexDamaged, ConfigError; stopped
        anywhere it leaves nothing to clean up but what the next compaction deletes.
        """
        async with self._syncing:
            index = await self._usable_index()
            if index is None:
                return Compaction()
            synced = await self._sync(index, full=True)
            done, snapshot = Compaction(), None
            if force or is_due(synced, self._compact_after):
                done, snapshot = await fold(self._context, index, synced, self._stamps.tick())
            deleted, failed = await sweep(self._context, synced, snapshot)
            self._wants_compaction = False
            return replace(done, deleted=deleted, failed=failed)

    async def rebuild(self) -> Rebuilt:
        """Makes the catalog again from the chunks' headers: see `rebuild`. Raises StoreError, ConfigError."""
        self._syncer.wants_full = True  # but not `catch_up`: a log that cannot be read is a reason to rebuild
        await self.poll()
        if self._index is None:
            raise ConfigError(f"catalog.index_dir: the index in {self._folder} cannot be used")
        lost = await hopeless(self._context, self._unread)
        return await rebuild(self._context, self._index, self.publish, self.forget, lost)
