"""What the index holds of a chunk, how records change it, and its packed form.

A chunk is in one of three states: unknown, stored (`ChunkEntry`) or forgotten (`Tombstone`). `merge` is the one rule
that moves it, built on `newer` of the format: the outcome does not depend on the order or the number of times that
records are applied, which is what lets agents read the log with overlap, merge snapshots and restart anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from s3kv.errors import CorruptData
from s3kv.format.columns import GROUP, KIND_ADDED, KIND_DELETED, ROW
from s3kv.format.limits import ID_BYTES
from s3kv.format.records import (
    ChunkAdded,
    ChunkDeleted,
    DeleteReason,
    GroupObject,
    Record,
    Stamp,
    Touched,
    delete_reason,
    hour_of,
    newer,
)

US = 1_000_000


class Location(NamedTuple):
    """Where a block is stored: it is number `index` among the chunk's `blocks` blocks."""

    chunk_id: bytes
    index: int  # type: ignore[assignment]  # tuple.index is of no use here
    blocks: int


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """A stored chunk: the record that won, and the last hour (since 1970) in which it was used or added."""

    added: ChunkAdded
    touched_hour: int

    @property
    def chunk_id(self) -> bytes:
        return self.added.chunk_id

    @property
    def stamp(self) -> Stamp:
        return self.added.stamp

    @property
    def blocks(self) -> tuple[bytes, ...]:
        return self.added.blocks

    @property
    def size(self) -> int:
        """Bytes of all the chunk's objects."""
        return self.added.size


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A forgotten chunk: every add up to `stamp` stays hidden. `noted_hour` is when a catalog first learned of it."""

    deleted: ChunkDeleted
    noted_hour: int

    @property
    def chunk_id(self) -> bytes:
        return self.deleted.chunk_id

    @property
    def stamp(self) -> Stamp:
        return self.deleted.stamp

    @property
    def reason(self) -> DeleteReason:
        return self.deleted.reason


Entry = ChunkEntry | Tombstone


def merge(old: Entry | None, record: Record, hour: int) -> Entry | None:
    """The entry after `record`; `old` itself when nothing changes. None: the chunk stays unknown.

    `hour` is when a deletion was learned of, or for an add the last use known besides it (0: none).
    """
    if isinstance(record, Touched):
        # A touch of a chunk that is not stored says nothing: adding it again counts as a use anyway.
        return _touched(old, record.hour)
    if old is not None and not newer(record, record_of(old)):
        return _touched(old, hour) if isinstance(record, ChunkAdded) else old
    if isinstance(record, ChunkDeleted):
        return Tombstone(record, hour)
    used = old.touched_hour if isinstance(old, ChunkEntry) else 0
    return ChunkEntry(record, max(used, hour, hour_of(record.stamp.time_us / US)))


def _touched(old: Entry | None, hour: int) -> Entry | None:
    if isinstance(old, ChunkEntry) and hour > old.touched_hour:
        return replace(old, touched_hour=hour)
    return old


def record_of(entry: Entry) -> ChunkAdded | ChunkDeleted:
    return entry.added if isinstance(entry, ChunkEntry) else entry.deleted


# The packed form of an entry is one row of a snapshot block followed by the row's hashes, groups and shards, so that
# snapshots are loaded and written by copying bytes. The index is made again when INDEX_FORMAT changes.
INDEX_FORMAT = 1

_ROW = Struct("<16sQII16sIIBBBBI")
_GROUP = Struct("<QI")
_BLOCK = Struct(">HH16s")  # blocks missing to the largest chunk, index, chunk id
_LARGEST = (1 << 16) - 1

BLOCK_VALUE_BYTES = _BLOCK.size
KIND_OFFSET = 56
assert (_ROW.size, _GROUP.size) == (ROW.itemsize, GROUP.itemsize)
assert ROW.fields is not None and ROW.fields["kind"][1] == KIND_OFFSET


def is_stored(packed: bytes) -> bool:
    """Whether a packed entry is a stored chunk, without unpacking it."""
    return packed[KIND_OFFSET] == KIND_ADDED


def pack(entry: Entry) -> bytes:
    if isinstance(entry, Tombstone):
        reason = int(entry.reason)
        numbers = (0, 0, KIND_DELETED, reason, 0, 0, 0)
        return _ROW.pack(entry.chunk_id, *entry.stamp, entry.noted_hour, bytes(ID_BYTES), *numbers)
    added = entry.added
    counts = len(added.blocks), KIND_ADDED, added.codec_id, len(added.shards), len(added.groups)
    row = _ROW.pack(
        added.chunk_id, *added.stamp, entry.touched_hour, added.parent, added.start_block, *counts, 0
    )  # fmt: skip
    return b"".join([row, *added.blocks, *(_GROUP.pack(*group) for group in added.groups), bytes(added.shards)])


def unpack(data: bytes) -> Entry:
    """Raises CorruptData when the index is damaged."""
    try:
        return _unpack(data)
    except (ValueError, StructError) as error:
        raise CorruptData(f"entry of {len(data)} bytes is damaged: {error}") from error


def _unpack(data: bytes) -> Entry:
    fields = _ROW.unpack_from(data)
    chunk_id, time_us, agent, hour, parent, start, n_blocks, kind, code, n_shards, n_groups, _ = fields
    stamp = Stamp(time_us, agent)
    groups_at = _ROW.size + n_blocks * ID_BYTES
    shards_at = groups_at + n_groups * _GROUP.size
    if kind not in (KIND_ADDED, KIND_DELETED) or len(data) != shards_at + n_shards:
        raise ValueError("wrong kind or length")
    if kind == KIND_DELETED:
        return Tombstone(ChunkDeleted(chunk_id, stamp, delete_reason(code)), hour)
    blocks = tuple(data[at : at + ID_BYTES] for at in range(_ROW.size, groups_at, ID_BYTES))
    groups = tuple(GroupObject(*pair) for pair in _GROUP.iter_unpack(data[groups_at:shards_at]))
    added = ChunkAdded(chunk_id, stamp, parent, start, blocks, code, tuple(data[shards_at:]), groups)
    return ChunkEntry(added, hour)


def pack_location(location: Location) -> bytes:
    """Packed locations of one block sort by preference: the larger chunk first (fewer objects for a long prefix)."""
    return _BLOCK.pack(_LARGEST - location.blocks, location.index, location.chunk_id)


def unpack_location(value: bytes) -> Location:
    missing, index, chunk_id = _BLOCK.unpack(value)
    return Location(chunk_id, index, _LARGEST - missing)


def locations_of(entry: ChunkEntry) -> list[tuple[bytes, bytes]]:
    """The (block hash, packed location) pairs of a chunk."""
    total = len(entry.blocks)
    return [(block, pack_location(Location(entry.chunk_id, at, total))) for at, block in enumerate(entry.blocks)]


def blocks_after(packed: bytes | memoryview | None, location: Location) -> bytes:
    """The hashes, one after another, that follow `location` in its packed chunk. CorruptData when it is not there."""
    if packed is None:
        raise CorruptData(f"chunk {location.chunk_id.hex()} of a block is missing")
    return bytes(packed[_ROW.size + (location.index + 1) * ID_BYTES : _ROW.size + location.blocks * ID_BYTES])


def locations_along(listed: bytes, location: Location, hashes: Sequence[bytes], start: int) -> list[Location]:
    """Locations of those of `hashes[start:]` that are `listed`, one for one, right after `location`."""
    chunk_id, index, blocks = location
    count = min(blocks - index - 1, len(hashes) - start)
    if listed[: count * ID_BYTES] != b"".join(hashes[start : start + count]):
        places = (listed[at : at + ID_BYTES] for at in range(0, count * ID_BYTES, ID_BYTES))
        pairs = zip(places, hashes[start : start + count], strict=True)
        count = next((at for at, (place, asked) in enumerate(pairs) if place != asked), count)
    return [Location(chunk_id, at, blocks) for at in range(index + 1, index + 1 + count)]
