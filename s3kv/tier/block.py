"""Values of the directory: what it keeps of a block, and what it hands out."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from s3kv.identity import BlockHash

Holder = Hashable
"""An engine process, named by whatever the caller can later say "has exited" of."""
ReaderId = Hashable
"""One reader of a lease, usually the rank."""


class State(Enum):
    """What a slot that is not free is doing."""

    WRITING = "writing"
    """Parts are being copied in by engines, or some have arrived and others have not."""
    FETCHING = "fetching"
    """The agent is filling it from storage."""
    RESIDENT = "resident"
    """Every part is there; may be offered."""
    DOOMED = "doomed"
    """Forgotten (no longer found by its hash), but somebody still copies in or out: freed once they are done."""


class Committed(Enum):
    """What a commit led to."""

    STALE = "stale"
    """The ticket is of an earlier use of the slot, or its block was given up meanwhile. Ignored and counted."""
    WAITING = "waiting"
    """Other parts are still missing."""
    DIRTY = "dirty"
    """The block became resident and waits for upload: hand it to the packer."""
    CLEAN = "clean"
    """The block became resident, but too many wait for upload: it is not to be uploaded (counted)."""


class Reserved(NamedTuple):
    """Room to copy one part of a block into. `ticket` must come back with the commit."""

    slot: int
    ticket: int


class Held(NamedTuple):
    """A resident block, as the packer and the uploader need it. `start_block` is its ordinal in its chain."""

    block: BlockHash
    slot: int
    ticket: int
    parent: BlockHash
    start_block: int


class Match(NamedTuple):
    """`slots[i]` holds the i-th block asked for. `lease_id` 0: nothing is resident, nothing to release."""

    lease_id: int
    slots: list[int]


@dataclass(slots=True, eq=False)
class Block:
    """One occupied slot. `committed` is a mask of part positions; `writers` maps part position to who copies it in."""

    hash: BlockHash
    parent: BlockHash
    start_block: int
    slot: int
    ticket: int
    state: State
    committed: int = 0
    writers: dict[int, Holder] = field(default_factory=dict)
    fetching: bool = False
    pins: int = 0
    """Leases that cover it."""
    kept: int = 0
    """Holds of the uploader, plus one while dirty."""
    dirty: bool = False

    @property
    def busy(self) -> bool:
        """Whether its slot may not be given to another block."""
        return bool(self.pins or self.kept or self.writers or self.fetching)


@dataclass(slots=True)
class Sums:
    """Counted since the start, in blocks."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    no_room: int = 0
    """Not taken in for want of an evictable slot."""
    pin_limited: int = 0
    """Resident, but not offered, because offers had pinned as many as they may."""
    stale_commits: int = 0
    """Commits and abandons of reservations that had ended."""
    abandoned: int = 0
    """Parts given up by their engine or by its death."""
    upload_dropped: int = 0
    """Became resident without being queued for upload."""


@dataclass(slots=True)
class Counters(Sums):
    """The sums, and gauges of this moment, in slots."""

    slots: int = 0
    budget: int = 0
    """May be in use, as far as the node's budget goes."""
    in_use: int = 0
    free: int = 0
    resident: int = 0
    arriving: int = 0
    """Being written or fetched, or with some parts only."""
    doomed: int = 0
    """Forgotten, but still being copied from or into."""
    dirty: int = 0
    pinned: int = 0
    """Under at least one lease."""
    quarantined: int = 0
    """Kept for a process whose connection broke and that may still be copying."""
