"""The index as dicts, kept by folder, so that a "process" finds it again: for simulations that open thousands.

Same methods, same atomicity (a call is all or nothing), no lmdb. `use_dict_indexes` puts it in place of the real one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from s3kv.catalog import catalog, sync
from s3kv.catalog.entry import ChunkEntry, Entry, Location, Tombstone, merge, pack
from s3kv.catalog.index import Counts
from s3kv.catalog.names import NO_MARKS, Mark, Source
from s3kv.format.records import Record

SCRATCH = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
"""Where snapshots are put together; the files have no names."""


class Disk:
    """What survives a process: an index by folder."""

    def __init__(self) -> None:
        self.indexes: dict[Path, DictIndex] = {}


class DictIndex:
    def __init__(self, identity: str) -> None:
        self.folder = SCRATCH
        self.identity = identity
        self.clear()

    def clear(self) -> None:
        self.chunks: dict[bytes, Entry] = {}
        self.places: dict[bytes, set[tuple[int, int, bytes]]] = {}
        self.marked: dict[Source, dict[bytes, Mark]] = {"log": {}, "snaps": {}}
        self.flags: dict[str, bytes] = {}
        self.cursor_us = 0
        self.synced_s = 0.0

    @property
    def is_new(self) -> bool:
        return self.synced_s == 0.0

    def close(self, *, clean: bool = True) -> None:
        pass

    def destroy(self) -> None:
        self.clear()

    def lookup(self, hashes: Sequence[bytes]) -> list[Location]:
        found = []
        for name in hashes:
            places = self.locations(name)
            if not places:
                break
            found.append(places[0])
        return found

    def locations(self, block: bytes) -> list[Location]:
        return [Location(chunk_id, at, -size) for size, at, chunk_id in sorted(self.places.get(block, ()))]

    def get(self, chunk_id: bytes) -> Entry | None:
        return self.chunks.get(chunk_id)

    def packed(self, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        names = sorted(name for name in self.chunks if name > after)[:limit]
        return [(name, pack(self.chunks[name])) for name in names]

    def counts(self) -> Counts:
        stored = [entry for entry in self.chunks.values() if isinstance(entry, ChunkEntry)]
        blocks = sum(len(places) for places in self.places.values())
        return Counts(len(stored), sum(entry.size for entry in stored), len(self.chunks) - len(stored), blocks)

    def flag(self, name: str) -> bytes | None:
        return self.flags.get(name)

    def set_flag(self, name: str, value: bytes | None) -> None:
        if value is None:
            self.flags.pop(name, None)
        else:
            self.flags[name] = value

    def set_synced(self, now_s: float) -> None:
        self.synced_s = now_s

    def marks(self, source: Source, names: Iterable[bytes]) -> list[Mark]:
        return [self.marked[source].get(name, Mark.NONE) for name in names]

    def apply(
        self,
        records: Iterable[tuple[Record, int]],
        *,
        log: Mapping[bytes, Mark] = NO_MARKS,
        snaps: Mapping[bytes, Mark] = NO_MARKS,
        cursor_us: int | None = None,
    ) -> int:
        changed = sum(self._merge_one(record, hour) for record, hour in records)
        self.marked["log"].update(log)
        self.marked["snaps"].update(snaps)
        if cursor_us is not None:
            self.cursor_us = cursor_us
        return changed

    def _merge_one(self, record: Record, hour: int) -> bool:
        old = self.chunks.get(record.chunk_id)
        new = merge(old, record, hour)
        if new is old or new is None:
            return False
        self.chunks[record.chunk_id] = new
        for entry, change in ((old, set.discard), (new, set.add)):
            if isinstance(entry, ChunkEntry):
                for at, name in enumerate(entry.blocks):
                    change(self.places.setdefault(name, set()), (-len(entry.blocks), at, entry.chunk_id))
        return True

    def prune_marks(self, source: Source, listed: Iterable[bytes], first: bytes, last: bytes) -> int:
        keep = set(listed)
        marks = self.marked[source]
        gone = [name for name in marks if first <= name <= last and name not in keep]
        if any(marks[name] is Mark.APPLIED for name in gone):
            self.flags["unlisted"] = b"1"
        for name in gone:
            del marks[name]
        return len(gone)

    def prune_tombstones(self, noted_before_hour: int) -> int:
        old = [
            name
            for name, entry in self.chunks.items()
            if isinstance(entry, Tombstone) and entry.noted_hour < noted_before_hour
        ]
        for name in old:
            del self.chunks[name]
        return len(old)


@contextmanager
def use_dict_indexes(disk: Disk) -> Iterator[None]:
    """Catalogs opened within keep their indexes on `disk`; snapshots are merged, since nothing is loaded in bulk."""

    class Opener(DictIndex):
        @classmethod
        def open(cls, folder: Path, identity: str, *, map_bytes: int) -> DictIndex:
            held = disk.indexes.get(folder)
            if held is None or held.identity != identity:
                held = disk.indexes[folder] = DictIndex(identity)
            return held

    with mock.patch.object(catalog, "Index", Opener), mock.patch.object(sync.Syncer, "_load", sync.Syncer._merge):
        yield
