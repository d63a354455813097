"""Which records are believed. Pure, and the same on every agent: judged by the record and its source alone.

A record that passes cannot make an agent serve wrong bytes (blocks are checked when they are read); what is kept out
here would cost misses: a chunk id that is not that of its blocks, or a stamp so far in the future that nothing written
later could replace it. Comparing with the source's own time, not with this node's clock, keeps agents of one mind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from s3kv.catalog.entry import US
from s3kv.format.columns import KIND_ADDED, SnapshotBlock
from s3kv.format.header import chunk_id
from s3kv.format.limits import ID_BYTES
from s3kv.format.records import ChunkAdded, Record, Touched, hour_of


@dataclass(frozen=True, slots=True)
class Admission:
    """For one namespace: its digest, how many layer groups it has, and how far stamps may lead their source."""

    namespace_digest: bytes
    groups: int
    max_skew_us: int

    def latest_us(self, source_us: int) -> int:
        return source_us + self.max_skew_us

    def latest_hour(self, source_us: int) -> int:
        return hour_of(self.latest_us(source_us) / US)

    def admits(self, record: Record, source_us: int) -> bool:
        """`source_us`: the time in the key of the segment."""
        if isinstance(record, Touched):
            return record.hour <= self.latest_hour(source_us)
        if record.stamp.time_us > self.latest_us(source_us):
            return False
        if not isinstance(record, ChunkAdded):
            return True
        right_id = record.chunk_id == chunk_id(self.namespace_digest, record.parent, record.blocks)
        return right_id and len(record.groups) == self.groups

    def admitted_rows(self, block: SnapshotBlock, source_us: int) -> NDArray[np.bool_]:
        """As `admits`, for each row of a snapshot; `source_us` is the time in its key."""
        rows = block.rows
        added = rows["kind"] == KIND_ADDED
        good: NDArray[np.bool_] = rows["time_us"] <= np.uint64(min(self.latest_us(source_us), (1 << 64) - 1))
        good &= ~added | (rows["n_groups"] == self.groups)
        ids, parents, hashes = rows["chunk_id"].tobytes(), rows["parent"].tobytes(), block.hashes.tobytes()
        ends = (np.cumsum(rows["n_blocks"], dtype=np.int64) * ID_BYTES).tolist()
        begin = 0
        for at, end in enumerate(ends):
            if end > begin:
                place = slice(at * ID_BYTES, (at + 1) * ID_BYTES)
                good[at] &= ids[place] == chunk_id(self.namespace_digest, parents[place], [hashes[begin:end]])
            begin = end
        return good
