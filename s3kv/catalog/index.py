"""The node's copy of the catalog: an lmdb environment in a folder of its own. A cache of the bucket, nothing more.

Kept here:

* One write transaction holds records and the marks of the segments they came from, so after a crash at any point the
  index is that of some prefix of the work, and whatever is not marked is applied again (`merge` allows it).
* A block that several chunks hold is found in the largest; when that is forgotten the others come forward.
* One process writes (`writer.lock`); any number read, also while it writes, and a read never waits.
* A full disk or map is `IndexUnwritable`, damage is `IndexDamaged`: the caller degrades, or makes the index again.

Tables: `blocks`: hash -> locations, preferred first (sorted duplicates); `chunks`: chunk id -> packed entry; `log` and
`snaps`: names of the applied segments and snapshots; `meta`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import IO, Any

import lmdb

from s3kv.catalog.entry import (
    INDEX_FORMAT,
    ChunkEntry,
    Entry,
    Location,
    Tombstone,
    blocks_after,
    is_stored,
    locations_along,
    locations_of,
    merge,
    pack,
    unpack,
    unpack_location,
)
from s3kv.catalog.faults import IndexDamaged, IndexUnwritable, translated
from s3kv.catalog.folder import Marker, boot_id, lock_folder, read_marker, wipe, write_marker
from s3kv.catalog.names import NO_MARKS, Mark, Source
from s3kv.errors import ConfigError
from s3kv.format.limits import ID_BYTES
from s3kv.format.records import ChunkAdded, Record

TABLES = ("blocks", "chunks", "log", "snaps", "meta")
WORTH_A_LOOK = 3  # blocks left in a chunk from which on it is cheaper to read its list than to look for each
TRANSACTION_BLOCKS = 16_384  # random inserts dirty a page each: at most 64 MiB of memory a transaction
MAX_READERS = 510

_COUNTS = Struct("<QQQ")
_U64 = Struct("<Q")
_F64 = Struct("<d")


@dataclass(slots=True)
class Counts:
    """Of the whole index. A block that two chunks hold counts twice in `blocks`."""

    chunks: int = 0
    bytes: int = 0
    tombstones: int = 0
    blocks: int = 0


class Index:
    """See the module. Reads are safe in any thread; writes come from one thread at a time."""

    def __init__(self, env: lmdb.Environment, folder: Path, marker: Marker | None, lock: IO[bytes] | None) -> None:
        self._env = env
        self.folder = folder
        self._marker = marker
        self._lock = lock
        self.tables: dict[str, Any] = {}
        for name in TABLES:
            duplicates = name == "blocks"
            self.tables[name] = env.open_db(
                name.encode(), dupsort=duplicates, dupfixed=duplicates, create=lock is not None
            )

    @classmethod
    def open(cls, folder: Path, identity: str, *, map_bytes: int, boot: str | None = None) -> Index:
        """Opens for writing. An index of another store or format, or one that a machine crash may have torn, or whose
        first load did not end, is thrown away: then `is_new`. Raises ConfigError (folder unusable or taken)."""
        lock = lock_folder(folder)
        boot = boot_id() if boot is None else boot
        try:
            marker = read_marker(folder)
            if marker is None or not marker.trusted(INDEX_FORMAT, identity, boot):
                wipe(folder)
            return cls._open_locked(folder, Marker(INDEX_FORMAT, identity, boot, clean=False), map_bytes, lock)
        except (OSError, lmdb.Error, IndexUnwritable) as error:
            lock.close()
            raise ConfigError(f"catalog.index_dir: the index in {folder} cannot be opened: {error}") from error

    @classmethod
    def _open_locked(cls, folder: Path, marker: Marker, map_bytes: int, lock: IO[bytes]) -> Index:
        write_marker(folder, marker)
        with suppress(lmdb.Error, IndexDamaged):
            env = _environment(folder, map_bytes)
            with suppress(lmdb.Error, IndexDamaged):
                index = cls(env, folder, marker, lock)
                if not index.flag("loading"):
                    env.reader_check()  # a reader that was killed would keep old pages for ever
                    index.forget_bad()
                    return index
            env.close()
        wipe(folder)
        write_marker(folder, marker)
        return cls(_environment(folder, map_bytes), folder, marker, lock)

    @classmethod
    def open_readonly(cls, folder: Path, *, boot: str | None = None) -> Index:
        """For other processes of the node (the CLI). Raises ConfigError when there is no index that can be trusted."""
        marker = read_marker(folder)
        boot = boot_id() if boot is None else boot
        if marker is None or not marker.trusted(INDEX_FORMAT, marker.identity, boot):
            raise ConfigError(f"catalog.index_dir: {folder} holds no usable index; start the agent first")
        try:
            return cls(_environment(folder, None), folder, None, None)
        except lmdb.Error as error:
            raise ConfigError(f"catalog.index_dir: the index in {folder} cannot be read: {error}") from error

    @property
    def is_new(self) -> bool:
        """No sync with the bucket was ever completed."""
        return self.synced_s == 0.0

    def close(self, *, clean: bool = True) -> None:
        """`clean` syncs and says so in the marker, so that the index also outlives a reboot; may be repeated."""
        if self._lock is None:
            self._env.close()
            return
        if clean and self._marker is not None:
            with suppress(OSError, lmdb.Error):  # not clean, then: at worst the next start loads again
                self._env.sync(True)
                write_marker(self.folder, Marker(self._marker.format, self._marker.identity, self._marker.boot, True))
        self._env.close()
        self._lock.close()
        self._lock, self._marker = None, None

    def destroy(self) -> None:
        """Closes and throws away."""
        self._env.close()
        wipe(self.folder)
        self.close(clean=False)

    # Reading

    def lookup(self, hashes: Sequence[bytes]) -> list[Location]:
        """Locations of the longest prefix of `hashes` that is stored. Raises IndexDamaged.

        A chunk lists its blocks, so one look at it answers for all that follow in it: a few steps in the tree for a
        chunk instead of a few for each block.
        """
        found: list[Location] = []
        chunks = self.tables["chunks"]
        with translated(writing=False), self._env.begin(db=self.tables["blocks"]) as txn:
            while len(found) < len(hashes) and (value := _value(txn, hashes[len(found)])) is not None:
                location = unpack_location(value)
                found.append(location)
                if location.blocks - location.index > WORTH_A_LOOK and len(found) < len(hashes):
                    listed = blocks_after(txn.get(location.chunk_id, db=chunks), location)
                    found.extend(locations_along(listed, location, hashes, len(found)))
        return found

    def locations(self, block: bytes) -> list[Location]:
        """Every place of one block, preferred first."""
        with translated(writing=False), self._env.begin(db=self.tables["blocks"]) as txn, txn.cursor() as cursor:
            return [unpack_location(value) for value in cursor.iternext_dup()] if cursor.set_key(block) else []

    def get(self, chunk_id: bytes) -> Entry | None:
        with translated(writing=False), self._env.begin(db=self.tables["chunks"]) as txn:
            value = _value(txn, chunk_id)
            return unpack(value) if value is not None else None

    def packed(self, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """At most `limit` (chunk id, packed entry) with ids above `after`, in order, tombstones among them.

        Short transactions: a long one would keep every page that is replaced meanwhile."""
        with translated(writing=False), self._env.begin(db=self.tables["chunks"]) as txn, txn.cursor() as cursor:
            found = cursor.set_range(after) if after else cursor.first()
            if found and cursor.key() == after:
                found = cursor.next()
            return [item for _, item in zip(range(limit), cursor.iternext(), strict=False)] if found else []

    def counts(self) -> Counts:
        with translated(writing=False), self._env.begin() as txn:
            return self._counts(txn)

    def flag(self, name: str) -> bytes | None:
        with translated(writing=False), self._env.begin(db=self.tables["meta"]) as txn:
            value: bytes | None = txn.get(name.encode())
            return value

    @property
    def cursor_us(self) -> int:
        """The time up to which the log was read."""
        value = self.flag("cursor")
        return int(_U64.unpack(value)[0]) if value else 0

    @property
    def synced_s(self) -> float:
        """When the index last had all that the bucket lists, by this node's clock; 0.0 for never."""
        value = self.flag("synced")
        return float(_F64.unpack(value)[0]) if value else 0.0

    def marks(self, source: Source, names: Iterable[bytes]) -> list[Mark]:
        """What was done about each of `names`."""
        with translated(writing=False), self._env.begin(db=self.tables[source]) as txn:
            return [Mark(txn.get(name, b"\0")[0]) for name in names]

    # Writing

    def apply(
        self,
        records: Iterable[tuple[Record, int]],
        *,
        log: Mapping[bytes, Mark] = NO_MARKS,
        snaps: Mapping[bytes, Mark] = NO_MARKS,
        cursor_us: int | None = None,
    ) -> int:
        """Merges (record, hour) pairs, see `merge`, then marks their sources. Returns how many changed something.

        Large inputs take several transactions; the marks are in the last, so a crash between repeats, never skips.
        Raises IndexUnwritable or IndexDamaged: the marks are not there then.
        """
        changed = 0
        batch: list[tuple[Record, int]] = []
        weight = 0
        for record, hour in records:
            batch.append((record, hour))
            weight += 1 + (len(record.blocks) if isinstance(record, ChunkAdded) else 0)
            if weight >= TRANSACTION_BLOCKS:
                changed += self._merge_batch(batch)
                batch, weight = [], 0

        def last(txn: lmdb.Transaction) -> int:
            merged = self._merge_all(txn, batch)
            for source, names in (("log", log), ("snaps", snaps)):
                for name, mark in names.items():
                    txn.put(name, bytes([mark]), db=self.tables[source])
            if cursor_us is not None:
                txn.put(b"cursor", _U64.pack(cursor_us), db=self.tables["meta"])
            return merged

        return changed + self.write(last)

    def set_synced(self, now_s: float) -> None:
        self.set_flag("synced", _F64.pack(now_s))

    def set_flag(self, name: str, value: bytes | None) -> None:
        """Kept like a record; None removes it. An index that is opened with "loading" set is thrown away."""

        def change(txn: lmdb.Transaction) -> int:
            table = self.tables["meta"]
            return txn.delete(name.encode(), db=table) if value is None else txn.put(name.encode(), value, db=table)

        self.write(change)

    def prune_marks(self, source: Source, listed: Iterable[bytes], first: bytes, last: bytes) -> int:
        """Drops the marks in [`first`, `last`] of sources that are not `listed`: deleted, so never to be seen again.

        Sets the flag "unlisted" when one of them was not folded: somebody else deleted it, and the index may now hold
        what nothing in the bucket says.
        """
        keep = set(listed)

        def drop(txn: lmdb.Transaction) -> int:
            gone = 0
            with txn.cursor(db=self.tables[source]) as cursor:
                found = cursor.set_range(first)
                while found and bytes(cursor.key()) <= last:
                    if cursor.key() in keep:
                        found = cursor.next()
                        continue
                    if cursor.value()[0] == Mark.APPLIED:
                        txn.put(b"unlisted", b"1", db=self.tables["meta"])
                    cursor.delete()  # and stands on the next one, or on b"" at the end
                    gone += 1
                    found = cursor.key() != b""
            return gone

        return self.write(drop)

    def forget_bad(self) -> None:
        """Drops the marks of segments that could not be read: this release may know what an older one did not."""

        def drop(txn: lmdb.Transaction) -> int:
            with txn.cursor(db=self.tables["log"]) as cursor:
                bad = [bytes(name) for name, mark in cursor.iternext() if bytes(mark)[0] == Mark.BAD]
            return sum(txn.delete(name, db=self.tables["log"]) for name in bad)

        self.write(drop)

    def prune_tombstones(self, noted_before_hour: int) -> int:
        """Drops tombstones learned of before that hour. Returns how many."""
        dropped = 0
        after = b""
        while page := self.packed(after, 4096):
            after = page[-1][0]
            forgotten = [unpack(value) for _, value in page if not is_stored(value)]
            old = [
                entry for entry in forgotten if isinstance(entry, Tombstone) and entry.noted_hour < noted_before_hour
            ]
            dropped += self._drop_tombstones(old) if old else 0
        return dropped

    def write(self, work: Callable[[lmdb.Transaction], int]) -> int:
        """Runs `work` in one transaction: all of it or nothing is kept."""
        with translated(writing=True), self._env.begin(write=True) as txn:
            return work(txn)

    def count_loaded(self, txn: lmdb.Transaction, loaded: Counts) -> None:
        """Adds what a bulk load put into `chunks` by itself."""
        counts = self._counts(txn)
        counts.chunks += loaded.chunks
        counts.bytes += loaded.bytes
        counts.tombstones += loaded.tombstones
        self._put_counts(txn, counts)

    def _merge_batch(self, batch: Sequence[tuple[Record, int]]) -> int:
        return self.write(lambda txn: self._merge_all(txn, batch))

    def _merge_all(self, txn: lmdb.Transaction, records: Sequence[tuple[Record, int]]) -> int:
        if not records:
            return 0
        counts = self._counts(txn)
        changed = sum(self._merge_one(txn, record, hour, counts) for record, hour in records)
        self._put_counts(txn, counts)
        return changed

    def _merge_one(self, txn: lmdb.Transaction, record: Record, hour: int, counts: Counts) -> bool:
        value = txn.get(record.chunk_id, db=self.tables["chunks"])
        old = unpack(bytes(value)) if value is not None else None
        new = merge(old, record, hour)
        if new is old or new is None:
            return False
        txn.put(new.chunk_id, pack(new), db=self.tables["chunks"])
        self._count(counts, old, -1)
        self._count(counts, new, +1)
        blocks = self.tables["blocks"]
        # A chunk id determines its blocks, so between two stored states of one chunk they stay where they are.
        if isinstance(old, ChunkEntry) and isinstance(new, Tombstone):
            for block, location in locations_of(old):
                txn.delete(block, location, db=blocks)
        elif isinstance(new, ChunkEntry) and not isinstance(old, ChunkEntry):
            for block, location in locations_of(new):
                txn.put(block, location, dupdata=True, db=blocks)
        return True

    @staticmethod
    def _count(counts: Counts, entry: Entry | None, sign: int) -> None:
        if isinstance(entry, ChunkEntry):
            counts.chunks += sign
            counts.bytes += sign * entry.size
        elif entry is not None:
            counts.tombstones += sign

    def _drop_tombstones(self, old: Sequence[Tombstone]) -> int:
        def drop(txn: lmdb.Transaction) -> int:
            dropped = sum(txn.delete(entry.chunk_id, db=self.tables["chunks"]) for entry in old)
            counts = self._counts(txn)
            counts.tombstones -= dropped
            self._put_counts(txn, counts)
            return dropped

        return self.write(drop)

    def _counts(self, txn: lmdb.Transaction) -> Counts:
        value = txn.get(b"counts", db=self.tables["meta"])
        blocks = int(txn.stat(db=self.tables["blocks"])["entries"])
        chunks, stored, tombstones = _COUNTS.unpack(value) if value else (0, 0, 0)
        return Counts(chunks, stored, tombstones, blocks)

    def _put_counts(self, txn: lmdb.Transaction, counts: Counts) -> None:
        txn.put(b"counts", _COUNTS.pack(counts.chunks, counts.bytes, counts.tombstones), db=self.tables["meta"])


def _value(txn: lmdb.Transaction, key: bytes) -> bytes | None:
    """lmdb refuses some keys; what is no hash is simply not there."""
    value = txn.get(key) if len(key) == ID_BYTES else None
    return None if value is None else bytes(value)


def _environment(folder: Path, map_bytes: int | None) -> lmdb.Environment:
    """`map_bytes` None opens read-only. No fsync: see `folder`."""
    shared: dict[str, Any] = {"max_dbs": len(TABLES), "max_readers": MAX_READERS, "readahead": False, "mode": 0o600}
    if map_bytes is None:
        return lmdb.open(str(folder), readonly=True, **shared)
    return lmdb.open(str(folder), map_size=map_bytes, sync=False, metasync=False, writemap=False, **shared)
