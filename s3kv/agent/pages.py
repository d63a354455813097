"""Where the page of a layer group lies in the arenas' slots."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from s3kv.format.limits import MAX_BLOCKS, MAX_FRAMES, MAX_OBJECT_BYTES
from s3kv.identity import NamespaceSpec
from s3kv.tier.arena import Arena

_HEADER_ROOM_BYTES = 4 << 20
"""More than the header of MAX_FRAMES frames takes."""


class Pages:
    """The arenas of one namespace by part. Slot numbers are common to all parts."""

    def __init__(self, spec: NamespaceSpec, arenas: Mapping[int, Arena]) -> None:
        self.spec = spec
        self.arenas = dict(arenas)

    @property
    def shards_of_group(self) -> tuple[tuple[int, ...], ...]:
        return self.spec.shards_of_group

    @cached_property
    def _places(self) -> dict[tuple[int, int], tuple[int, int]]:
        return {
            (part.shard, group): (part.group_offset(group), size)
            for part in self.spec.parts
            for group, size in enumerate(part.group_bytes)
        }

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's pages in all groups and parts."""
        return sum(sum(part.group_bytes) for part in self.spec.parts)

    @property
    def most_blocks(self) -> int:
        """How many blocks the format lets one chunk hold."""
        shards = max(map(len, self.shards_of_group))
        group_bytes = max(map(sum, zip(*(part.group_bytes for part in self.spec.parts), strict=True)))
        return max(1, min(MAX_BLOCKS, MAX_FRAMES // shards, (MAX_OBJECT_BYTES - _HEADER_ROOM_BYTES) // group_bytes))

    def page_bytes(self, group: int, shard: int) -> int:
        return self._places[shard, group][1]

    def page(self, slot: int, group: int, shard: int) -> memoryview:
        offset, size = self._places[shard, group]
        return self.arenas[shard].view(slot)[offset : offset + size]
