"""Catalog records: what happened to chunks, in a form that may be applied in any order and any number of times.

Per chunk id the record with the larger (stamp, is a deletion) wins; `newer` is that rule. A `ChunkDeleted` therefore
hides every add whose stamp is at most its own, also one that is read later, and a chunk stored again after a
collection comes back with a larger stamp. `Touched` is a maximum of its own and never brings a chunk back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

from s3kv.format.limits import ID_BYTES, MAX_BLOCKS, MAX_GROUPS, MAX_OBJECT_BYTES, MAX_SHARDS, U8, U32, U64

SECONDS_PER_HOUR = 3600


class Stamp(NamedTuple):
    """When, by the writer's clock (microseconds since 1970, u64), and by which agent (u32): ordered in that order."""

    time_us: int
    agent: int


class GroupObject(NamedTuple):
    """One layer group's object of a chunk: all its bytes, and how many of them are header."""

    size: int
    header_size: int


class DeleteReason(IntEnum):
    """Why a chunk was forgotten. For people: every reason has the same effect. A reader knows new ones as OTHER."""

    OTHER = 0
    COLLECTED = 1
    MISSING = 2
    CORRUPT = 3
    REPLACED = 4


_REASONS = frozenset(DeleteReason)
REPAIR_REASONS = frozenset({DeleteReason.MISSING, DeleteReason.CORRUPT})


@dataclass(frozen=True, slots=True)
class ChunkAdded:
    """Every object of a chunk is durable.

    `blocks` are the block hashes in chain order, after `parent` (the hash of the block before, or ROOT);
    `start_block` is the ordinal of `blocks[0]` in its chain, `shards` the parts stored in each object, and `groups`
    has one entry per layer group, in order. Values outside the limits raise ValueError.
    """

    chunk_id: bytes
    stamp: Stamp
    parent: bytes
    start_block: int
    blocks: tuple[bytes, ...]
    codec_id: int
    shards: tuple[int, ...]
    groups: tuple[GroupObject, ...]

    def __post_init__(self) -> None:
        _check_ids(self.chunk_id, self.parent, *self.blocks)
        _check_stamp(self.stamp)
        _check(1 <= len(self.blocks) <= MAX_BLOCKS, "number of blocks")
        _check(0 <= self.start_block <= U32, "start_block")
        _check(0 <= self.codec_id <= U8, "codec_id")
        check_shards(self.shards)
        _check(1 <= len(self.groups) <= MAX_GROUPS, "number of layer groups")
        for size, header_size in self.groups:
            _check(0 < header_size <= size <= MAX_OBJECT_BYTES and header_size <= U32, "object size")

    @property
    def size(self) -> int:
        """Bytes of all the chunk's objects."""
        return sum(group.size for group in self.groups)


@dataclass(frozen=True, slots=True)
class ChunkDeleted:
    """The chunk is not to be read any more; its objects may be gone. Reasons in REPAIR_REASONS mark repairs."""

    chunk_id: bytes
    stamp: Stamp
    reason: DeleteReason = DeleteReason.COLLECTED

    def __post_init__(self) -> None:
        _check_ids(self.chunk_id)
        _check_stamp(self.stamp)

    @property
    def is_repair(self) -> bool:
        return self.reason in REPAIR_REASONS


@dataclass(frozen=True, slots=True)
class Touched:
    """The chunk was used in this hour (whole hours since 1970, u32). Coarse, so that use writes little."""

    chunk_id: bytes
    hour: int

    def __post_init__(self) -> None:
        _check_ids(self.chunk_id)
        _check(0 <= self.hour <= U32, "hour")


Record = ChunkAdded | ChunkDeleted | Touched


def hour_of(time_s: float) -> int:
    """The hour a `Touched` names for a time in seconds since 1970."""
    return max(0, min(int(time_s // SECONDS_PER_HOUR), U32))


def delete_reason(code: int) -> DeleteReason:
    """The reason a stored code means; OTHER for one that a later release added."""
    return DeleteReason(code) if code in _REASONS else DeleteReason.OTHER


def newer(new: ChunkAdded | ChunkDeleted, old: ChunkAdded | ChunkDeleted) -> bool:
    """Whether `new` replaces `old` of the same chunk. Equal stamps: a deletion wins; else the first seen stays."""
    return (new.stamp, isinstance(new, ChunkDeleted)) > (old.stamp, isinstance(old, ChunkDeleted))


def check_shards(shards: tuple[int, ...]) -> None:
    """Raises ValueError unless `shards` are 1..MAX_SHARDS part ids (u8) in ascending order."""
    _check(1 <= len(shards) <= MAX_SHARDS, "number of shards")
    _check(all(a < b for a, b in pairwise(shards)), "order of shards")
    _check(shards[0] >= 0 and shards[-1] <= U8, "shard")


def _check_ids(*ids: bytes) -> None:
    for value in ids:
        if len(value) != ID_BYTES:
            raise ValueError(f"a block hash or chunk id has {ID_BYTES} bytes, not {len(value)}")


def _check_stamp(stamp: Stamp) -> None:
    _check(0 <= stamp.time_us <= U64 and 0 <= stamp.agent <= U32, "stamp")


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} is outside the limits of the format")
