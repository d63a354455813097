"""The snapshot ring: memory beside the pages, where what a pass completed waits to be copied to slots.

Why: pages may be handed on, and overwritten, as soon as the next pass is prepared. A gather in stream order frees
everybody from that; `request_finished` need hold nothing. It takes 0.6 ms of an 8,192-token pass of 224 ms that leaves
1 GiB of KV (an 8B shape on an H200; docs/gpu.md).

Rows are taken in order by the executor's thread and given back in order by the saver's, so two counters are enough:
each is written by one thread alone. A row holds one block's pages as the slots do, part after part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from s3kv.connector.device import Device, Stream
from s3kv.connector.layout import PagedCache, Place, places
from s3kv.connector.strips import Gather, Lane, Strip
from s3kv.identity import NamespaceSpec

_PART_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `[start, start + count)`. `mark`: where the ring's free room begins once they are given back."""

    start: int
    count: int
    mark: int

    def head(self, count: int) -> Rows:
        """The first `count` of them."""
        return Rows(self.start, count, self.mark - self.count + count)

    def behind(self, count: int) -> Rows:
        """All but the first `count`."""
        return Rows(self.start + count, self.count - count, self.mark)


@dataclass(frozen=True, slots=True)
class RowPart:
    """Where one part's bytes lie in a row; they go to the beginning of a slot of that part."""

    part: int
    offset: int
    size: int


class RowLayout:
    """How a block's pages of the parts that this rank writes lie in a row of the ring."""

    def __init__(self, cache: PagedCache, namespace: NamespaceSpec, parts: tuple[int, ...]) -> None:
        by_shard = {part.shard: part for part in namespace.parts}
        self.parts: list[RowPart] = []
        offset = 0
        for shard in parts:
            size = by_shard[shard].group_offset(len(cache.groups))
            self.parts.append(RowPart(shard, offset, size))
            offset += -(-size // _PART_ALIGNMENT) * _PART_ALIGNMENT
        self.row_bytes = offset
        begin = {part.part: part.offset for part in self.parts}
        self.places: list[tuple[Place, int]] = [
            (place, begin[place.part] + place.offset) for place in places(cache, namespace, parts)
        ]


class SnapshotRing:
    """`rows` rows of `layout.row_bytes` on the device."""

    def __init__(self, device: Device, layout: RowLayout, rows: int) -> None:
        self.layout = layout
        self.rows = rows
        self._device = device
        self._strip = Strip.of(device.zeros(rows, layout.row_bytes))
        self._by_group = self._lanes_by_group()
        self._scratch = device.scratch(rows * len(self._by_group))
        self._taken = 0  # written by the executor's thread
        self._freed = 0  # written by the saver's thread

    @property
    def free(self) -> int:
        return self.rows - (self._taken - self._freed)

    def take(self, wanted: int) -> Rows | None:
        """Up to `wanted` rows side by side: what is free, and no further than the ring's end. None: it is full."""
        start = self._taken % self.rows
        count = min(wanted, self.free, self.rows - start)
        if count <= 0:
            return None
        self._taken += count
        return Rows(start, count, self._taken)

    def give_back(self, rows: Rows) -> None:
        """In the order in which they were taken."""
        self._freed = rows.mark

    def gather(self, start: int, pages: Sequence[list[int]], stream: Stream) -> None:
        """Enqueue: `pages[g][i]` of every group goes to row `start + i`.

        Row numbers wait for their upload in a place that belongs to the rows, so it is free again when the rows are.
        """
        gathers = [Gather(lanes, pages[group], start) for group, lanes in self._by_group]
        self._device.gather(gathers, stream, self._scratch, start * len(self._by_group))

    def _lanes_by_group(self) -> list[tuple[int, list[Lane]]]:
        """By layer group: from its regions to their columns of the ring."""
        by_group: dict[int, list[Lane]] = {}
        for place, offset in self.layout.places:
            column = self._strip.narrow(offset, place.region.size)
            by_group.setdefault(place.group, []).append(Lane.of(place.region.strip, column))
        return sorted(by_group.items())

    def column(self, part: RowPart) -> Strip:
        """One part's bytes of every row."""
        return self._strip.narrow(part.offset, part.size)


def ring_rows(row_bytes: int, max_bytes: int, wanted_rows: int) -> int:
    """The rows wanted, as far as `save.ring_max_bytes` allows; one at least."""
    return max(1, min(wanted_rows, max_bytes // max(1, row_bytes)))
