"""Loading a whole snapshot into an empty index: millions of blocks in seconds, in bounded memory.

Inserting hashes in random order rewrites a page each; in ascending order it fills pages one after another (4 times
faster, a quarter of the file). A snapshot ascends by chunk id, so the hashes are sorted here: rows are dealt out to
files by their first bits, then each file is sorted in memory and appended. Only the index's flag "loading" stands
between a crash and a half-filled index: it is set first, removed in the last transaction, and throws the index away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import lmdb
import numpy as np
from numpy.typing import NDArray

from s3kv.catalog.admission import Admission
from s3kv.catalog.entry import BLOCK_VALUE_BYTES, US
from s3kv.catalog.faults import IndexDamaged, translated
from s3kv.catalog.index import Counts, Index
from s3kv.catalog.names import Mark
from s3kv.format.columns import GROUP, KIND_ADDED, ROW, SnapshotBlock
from s3kv.format.limits import ID_BYTES
from s3kv.format.records import SECONDS_PER_HOUR, hour_of

BUCKET_BITS = 6  # 64 files: 10,000,000 blocks are 5.6 MB in each
TRANSACTION_ROWS = 65_536
_ROW_BYTES = ID_BYTES + BLOCK_VALUE_BYTES
_LARGEST = (1 << 16) - 1


class BulkLoader:
    """`add` the snapshot's blocks in order, then `finish`, all in the thread that writes; or `abandon`.

    After an error, or when dropped, the index must be closed and opened again: it starts empty then.
    """

    def __init__(self, index: Index, admission: Admission, source_us: int) -> None:
        """`index` is empty. `source_us`: the time in the snapshot's key."""
        self._index = index
        self._admission = admission
        self._source_us = source_us
        self._loaded = Counts()
        self.rejected = 0
        index.set_flag("loading", b"1")
        self._spills = [_spill(index.folder) for _ in range(1 << BUCKET_BITS)]

    def add(self, block: SnapshotBlock) -> None:
        """Raises IndexUnwritable, IndexDamaged."""
        good = self._admission.admitted_rows(block, self._source_us)
        self.rejected += len(good) - int(good.sum())
        rows = self._with_hours(block.rows)
        values = _packed_rows(rows, block, good)
        self._append("chunks", values)
        added = good & (rows["kind"] == KIND_ADDED)
        self._loaded.chunks += int(added.sum())
        self._loaded.tombstones += int(good.sum()) - int(added.sum())
        group_of_added = np.repeat(added, rows["n_groups"])
        self._loaded.bytes += int(block.groups["size"][group_of_added].sum())
        self._deal_out(_locations(rows, block.hashes, added))

    def finish(self, log: Mapping[bytes, Mark], snaps: Mapping[bytes, Mark]) -> Counts:
        """Sorts and appends the blocks, then marks the sources that the snapshot holds."""
        for spill in self._spills:
            with translated(writing=True):
                spill.seek(0)
                rows = np.frombuffer(spill.read(), np.uint8).reshape(-1, _ROW_BYTES)
            self._append_bucket(rows)
            spill.close()
        self._index.write(self._count)
        self._index.apply((), log=log, snaps=snaps)
        self._index.set_flag("loading", None)
        return self._index.counts()

    def abandon(self) -> None:
        """Lets go of the files; may be repeated, and follows `finish` too."""
        for spill in self._spills:
            with suppress(OSError):
                spill.close()

    def _count(self, txn: lmdb.Transaction) -> int:
        self._index.count_loaded(txn, self._loaded)
        return 0

    def _with_hours(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        """Hours as `merge` would set them: no use before the add; a deletion without an hour is noted now."""
        rows = rows.copy()
        used = np.minimum(rows["hour"], self._admission.latest_hour(self._source_us))
        made = (rows["time_us"] // (US * SECONDS_PER_HOUR)).astype(np.uint32)
        noted = np.where(used == 0, hour_of(self._source_us / US), used)
        rows["hour"] = np.where(rows["kind"] == KIND_ADDED, np.maximum(used, made), noted)
        return rows

    def _deal_out(self, rows: NDArray[np.uint8]) -> None:
        buckets = rows[:, 0] >> (8 - BUCKET_BITS)
        order = np.argsort(buckets, kind="stable")
        dealt = rows[order]
        ends = np.cumsum(np.bincount(buckets, minlength=len(self._spills))).tolist()
        begin = 0
        with translated(writing=True):
            for spill, end in zip(self._spills, ends, strict=True):
                spill.write(dealt[begin:end].tobytes())
                begin = end

    def _append_bucket(self, rows: NDArray[np.uint8]) -> None:
        """Appends rows of distinct hashes in order; the few whose hash may be that of the row before are just put."""
        high = rows[:, :8].copy().view(">u8")[:, 0].astype(np.uint64)
        order = np.argsort(high, kind="stable")
        rows, high = rows[order], high[order]
        repeated = np.zeros(len(rows), np.bool_)
        repeated[1:] = high[1:] == high[:-1]
        for start in range(0, len(rows), TRANSACTION_ROWS):
            part = slice(start, start + TRANSACTION_ROWS)
            self._append("blocks", _items(rows[part][~repeated[part]]))
        self._append("blocks", _items(rows[repeated]), in_order=False)

    def _append(self, table: str, items: Iterator[tuple[bytes, bytes]], *, in_order: bool = True) -> None:
        def put(txn: lmdb.Transaction) -> int:
            with txn.cursor(db=self._index.tables[table]) as cursor:
                consumed, added = cursor.putmulti(items, dupdata=True, append=in_order)
            if in_order and consumed != added:
                raise IndexDamaged(f"catalog index: {table} cannot be appended to in order")
            return int(added)

        self._index.write(put)


def _spill(folder: Path) -> IO[bytes]:
    """A nameless file: it is gone with the process, however that ends."""
    with translated(writing=True):
        return TemporaryFile(dir=folder, buffering=1 << 16)


def _items(rows: NDArray[np.uint8]) -> Iterator[tuple[bytes, bytes]]:
    raw = rows.tobytes()
    return ((raw[at : at + ID_BYTES], raw[at + ID_BYTES : at + _ROW_BYTES]) for at in range(0, len(raw), _ROW_BYTES))


def _packed_rows(
    rows: NDArray[np.void], block: SnapshotBlock, good: NDArray[np.bool_]
) -> Iterator[tuple[bytes, bytes]]:
    """(chunk id, packed entry) of the good rows: see `entry`."""
    raw, hashes, groups, shards = (part.tobytes() for part in (rows, block.hashes, block.groups, block.shards))
    widths = (("n_blocks", ID_BYTES), ("n_groups", GROUP.itemsize), ("n_shards", 1))
    ends = [(np.cumsum(rows[name], dtype=np.int64) * width).tolist() for name, width in widths]
    at_hash = at_group = at_shard = 0
    for at, (to_hash, to_group, to_shard, wanted) in enumerate(zip(*ends, good.tolist(), strict=True)):
        if wanted:
            row = raw[at * ROW.itemsize : (at + 1) * ROW.itemsize]
            tail = hashes[at_hash:to_hash] + groups[at_group:to_group] + shards[at_shard:to_shard]
            yield row[:ID_BYTES], row + tail
        at_hash, at_group, at_shard = to_hash, to_group, to_shard


def _locations(rows: NDArray[np.void], hashes: NDArray[np.uint8], added: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Rows of hash and packed location, shape (blocks of the added rows, 36), uint8."""
    counts = rows["n_blocks"].astype(np.int64)
    ends = np.cumsum(counts)
    place = np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(ends - counts, counts)
    wanted = np.repeat(added, counts)
    table = np.empty((len(hashes), _ROW_BYTES), np.uint8)
    table[:, :ID_BYTES] = hashes
    table[:, 16:18] = (_LARGEST - np.repeat(counts, counts)).astype(">u2")[:, None].view(np.uint8)
    table[:, 18:20] = place.astype(">u2")[:, None].view(np.uint8)
    table[:, 20:] = np.repeat(rows["chunk_id"], counts, axis=0)
    return table[wanted]
