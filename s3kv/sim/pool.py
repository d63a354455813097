"""Page slots of one layer group on one rank: their memory, who uses them, and what happens when nobody does.

A slot is used while a sequence refers to it, kept while only the reuse tree knows it, and free otherwise. A free slot
is poisoned at once and is the first to be handed out again: that is the earliest moment the contract allows, so a
connector that reads or writes a page too late shows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

import torch

from s3kv.sim.layout import KvCacheBufferRef, KvCacheRegion
from s3kv.sim.shape import BufferSpec

POISON_BYTE = 0xFF
"""Every float type reads bytes of 0xFF as NaN."""


@dataclass
class _Store:
    """Buffers of one size class, side by side in a slot: `memory` is uint8 `[slots, stride]`."""

    memory: torch.Tensor
    buffers: list[BufferSpec]
    offsets: list[int]

    def view(self, index: int) -> torch.Tensor:
        spec, offset = self.buffers[index], self.offsets[index]
        flat = self.memory[:, offset : offset + spec.nbytes].view(spec.dtype)
        return flat.view(flat.shape[0], *spec.shape)

    def regions(self, replicated: bool) -> list[KvCacheRegion]:
        """Runs of adjacent buffers of one class."""
        regions = []
        for kind, run in groupby(range(len(self.buffers)), key=lambda index: self.buffers[index].replicated):
            indices = list(run)
            if kind == replicated:
                regions.append(self._region(indices))
        return regions

    def _region(self, indices: list[int]) -> KvCacheRegion:
        first = self.offsets[indices[0]]
        return KvCacheRegion(
            base=self.memory.data_ptr() + first,
            size=sum(self.buffers[index].nbytes for index in indices),
            stride=self.memory.stride(0),
            num_slots=self.memory.shape[0],
            buffers=tuple(KvCacheBufferRef(self.buffers[i].layer, self.buffers[i].role) for i in indices),
            _device=self.memory.device,
        )


class PagePool:
    """The page slots of one layer group.

    padding_bytes: unused bytes at the end of every slot, so that strides are larger than sizes.
    poison: "nan" fills a freed slot with NaN, "garbage" with plausible numbers, "none" leaves it.
    """

    def __init__(
        self,
        buffers: list[BufferSpec],
        num_slots: int,
        *,
        window: int | None = None,
        padding_bytes: int = 0,
        poison: str = "nan",
        device: torch.device = torch.device("cpu"),
    ) -> None:
        self.window, self.num_slots = window, num_slots
        self._poison, self._device = poison, device
        self._stores = [_make_store(list(part), num_slots, padding_bytes, device) for part in _size_classes(buffers)]
        self._free = list(reversed(range(num_slots)))
        self._references = [0] * num_slots
        self._kept: dict[int, Callable[[], None]] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._fill(range(num_slots))

    @property
    def available(self) -> int:
        """Slots that `take` can hand out."""
        return len(self._free) + len(self._evictable)

    @property
    def used(self) -> int:
        """Slots that sequences refer to."""
        return self.num_slots - self.available

    def views(self) -> dict[int, dict[str, torch.Tensor]]:
        """By layer and role, views `[num_slots, *page shape]` into the memory."""
        views: dict[int, dict[str, torch.Tensor]] = {}
        for store in self._stores:
            for index, spec in enumerate(store.buffers):
                views.setdefault(spec.layer, {})[spec.role] = store.view(index)
        return views

    def regions(self, replicated: bool = False) -> tuple[KvCacheRegion, ...]:
        """The byte ranges of a page: those of this shard, or those alike on every shard."""
        return tuple(region for store in self._stores for region in store.regions(replicated))

    def memories(self) -> list[torch.Tensor]:
        """The memory itself, uint8 `[num_slots, stride]` for every size class."""
        return [store.memory for store in self._stores]

    def take(self) -> int:
        """A slot with one reference. Raises IndexError when none is available."""
        if not self._free:
            slot, _ = self._evictable.popitem(last=False)
            self._kept.pop(slot)()
            self._release([slot])
        slot = self._free.pop()
        self._references[slot] = 1
        return slot

    def refer(self, slot: int) -> None:
        """Adds a reference to a slot that is used or kept."""
        self._references[slot] += 1
        self._evictable.pop(slot, None)

    def drop(self, slots: Iterable[int], *, keep: bool = True, last: bool = False) -> None:
        """Takes one reference from each slot. Those left with none stay if kept and `keep`, and are freed otherwise.

        last: the freed slots are the last to be handed out again, not the first.
        """
        freed = []
        for slot in slots:
            self._references[slot] -= 1
            if self._references[slot]:
                continue
            if slot in self._kept and keep:
                self._evictable[slot] = None
            else:
                if slot in self._kept:
                    self._kept.pop(slot)()
                freed.append(slot)
        self._release(freed)
        if last and freed:
            del self._free[-len(freed) :]
            self._free[:0] = freed

    def evict_all(self) -> None:
        """Frees every slot that only the reuse tree knows."""
        while self._evictable:
            slot, _ = self._evictable.popitem(last=False)
            self._kept.pop(slot)()
            self._release([slot])

    def keep(self, slot: int, on_evict: Callable[[], None]) -> None:
        """Keeps a used slot's contents after its last reference, until the room is needed; then calls `on_evict`."""
        self._kept[slot] = on_evict

    def copy(self, source: int, target: int) -> None:
        """Copies a page's bytes, in stream order."""
        for store in self._stores:
            store.memory[target].copy_(store.memory[source])

    def _release(self, slots: list[int]) -> None:
        self._fill(slots)
        self._free.extend(slots)

    def _fill(self, slots: Iterable[int]) -> None:
        if self._poison == "none":
            return
        ordered = sorted(slots)
        for _, run in groupby(enumerate(ordered), key=lambda item: item[1] - item[0]):
            consecutive = [slot for _, slot in run]
            for store in self._stores:
                self._fill_rows(store, consecutive[0], consecutive[-1] + 1)

    def _fill_rows(self, store: _Store, low: int, high: int) -> None:
        if self._poison == "nan":
            store.memory[low:high].fill_(POISON_BYTE)
            return
        for index in range(len(store.buffers)):
            rows = store.view(index)[low:high]
            rows.copy_(torch.linspace(-2.0, 2.0, rows.numel(), device=self._device).view(rows.shape))


def _size_classes(buffers: list[BufferSpec]) -> list[list[BufferSpec]]:
    """Buffers by the size of their layer's key, scales apart. A replicated buffer stays among its layer's others."""
    classes: dict[tuple[str, int], list[BufferSpec]] = {}
    key_bytes = {spec.layer: spec.nbytes for spec in buffers if spec.role == "key"}
    for spec in buffers:
        kind = ("scale", spec.nbytes) if spec.role.endswith("_scale") else ("data", key_bytes[spec.layer])
        classes.setdefault(kind, []).append(spec)
    return list(classes.values())


def _make_store(buffers: list[BufferSpec], num_slots: int, padding: int, device: torch.device) -> _Store:
    offsets, end = [], 0
    for spec in buffers:
        offsets.append(end)
        end += spec.nbytes
    return _Store(torch.zeros(num_slots, end + padding, dtype=torch.uint8, device=device), buffers, offsets)
