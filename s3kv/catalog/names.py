"""Names of the catalog's objects, as the index marks them and as snapshots cover them.

A snapshot covers log segments by name. It also covers the snapshots that it was made from: those are listed as segments
of the agent SNAPSHOT_AGENT, which no agent may be, with the epoch as sequence number.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import Literal

from s3kv.format.keys import LogKey, SnapKey
from s3kv.format.limits import U32
from s3kv.format.snapshot import SegmentName

SNAPSHOT_AGENT = U32
UNLISTED = SegmentName(0, SNAPSHOT_AGENT, 0)
"""Covered by a snapshot that may hold more than the rest of what it covers; no reader has it, so all read it once."""
_NAME = Struct(">QII")  # big-endian: in the order of the keys
NAME_BYTES = _NAME.size
FIRST_NAME = bytes(NAME_BYTES)


def packed(name: SegmentName) -> bytes:
    return _NAME.pack(*name)


def of_segment(key: LogKey) -> SegmentName | None:
    """None for an agent that does not exist."""
    return None if key.agent == SNAPSHOT_AGENT else SegmentName(key.time_us, key.agent, key.seq)


def of_snapshot(key: SnapKey) -> SegmentName | None:
    """None for an epoch that no compaction reaches."""
    return None if key.epoch > U32 else SegmentName(key.time_us, SNAPSHOT_AGENT, key.epoch)


Source = Literal["log", "snaps"]


class Mark(IntEnum):
    """What was done about a segment or snapshot."""

    NONE = 0
    APPLIED = 1
    FOLDED = 2  # applied, and a listed snapshot holds it
    BAD = 3  # cannot be read: skipped


NO_MARKS: Mapping[bytes, Mark] = {}
