"""The KV cache layout that a V2 manager describes to a connector: byte ranges that repeat once per page slot.

Facts: the `KvCacheLayout` reference of TensorRT-LLM's "KV Cache Connector" page. One thing is added for the CPU: a
region knows its device, because an address alone does not say whose memory it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

BAD_PAGE_INDEX = -1
"""What stands in a page list where a block has no page. A valid subscript, so never index with it unchecked."""


def valid_page_slots(page_indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields `(block ordinal, page slot)` for the entries that address a page."""
    for ordinal, slot in enumerate(page_indices):
        if slot != BAD_PAGE_INDEX:
            yield ordinal, int(slot)


@dataclass(frozen=True)
class KvCacheBufferRef:
    """One (layer, role) buffer that a region covers. `role` is the manager's own name, such as "key" or "value"."""

    layer_id: int
    role: str
    expansion: int = 1


class _CudaMemory:
    """Presents raw device memory through `__cuda_array_interface__`; torch then makes a view, not a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


@dataclass(frozen=True)
class KvCacheRegion:
    """A contiguous byte range that repeats once per page slot: slot `i` is at `base + stride * i`, `size` bytes."""

    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[KvCacheBufferRef, ...]
    _device: torch.device = field(default=torch.device("cpu"), repr=False, compare=False)

    def address_of(self, slot_id: int) -> int:
        """Address of page slot `slot_id`. Raises IndexError outside `[0, num_slots)`."""
        self._check(slot_id)
        return self.base + self.stride * slot_id

    def as_tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A strided view `[num_slots, size // itemsize]`; row `i` is slot `i`. Takes any subscript, -1 included."""
        item = dtype.itemsize
        if self.size % item or self.stride % item:
            raise ValueError(f"region size {self.size} and stride {self.stride} are not multiples of {item} bytes")
        extent = self.stride * (self.num_slots - 1) + self.size
        if self._device.type == "cuda":
            flat = torch.as_tensor(_CudaMemory(self.base, extent), device=self._device)
        else:
            flat = torch.frombuffer((ctypes.c_uint8 * extent).from_address(self.base), dtype=torch.uint8)
        return flat.view(dtype).as_strided((self.num_slots, self.size // item), (self.stride // item, 1))

    def slot_tensor(self, slot_id: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The bytes of one page slot. Raises IndexError outside `[0, num_slots)`."""
        self._check(slot_id)
        return self.as_tensor(dtype)[slot_id]

    def _check(self, slot_id: int) -> None:
        if not 0 <= slot_id < self.num_slots:
            raise IndexError(f"page slot {slot_id} is outside [0, {self.num_slots})")


@dataclass(frozen=True)
class PlainLayerGroupLayout:
    """One layer group, as builds describe it that know no replicated regions: the attribute does not exist."""

    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of this attention shard that the group occupies for one page slot."""
        return sum(region.size for region in self.regions)


@dataclass(frozen=True)
class KvCacheLayerGroupLayout(PlainLayerGroupLayout):
    """One layer group, the unit that page slots are scoped to. `replicated_regions`: bytes alike on every shard."""

    replicated_regions: tuple[KvCacheRegion, ...] = ()

    @property
    def replicated_bytes_per_page(self) -> int:
        """Bytes that are the same on every attention shard, for one page slot."""
        return sum(region.size for region in self.replicated_regions)


@dataclass(frozen=True)
class KvCacheLayout:
    """What a connector is handed in place of a single pool tensor."""

    tokens_per_block: int
    groups: tuple[PlainLayerGroupLayout, ...]
    dtype: torch.dtype = torch.uint8

    def group(self, layer_group_id: int) -> PlainLayerGroupLayout:
        """The group with this id. Raises KeyError when there is none."""
        for group in self.groups:
            if group.layer_group_id == layer_group_id:
                return group
        raise KeyError(f"no layer group {layer_group_id}")

    def group_of_layer(self, layer_id: int) -> PlainLayerGroupLayout:
        """The group that owns a model layer. Raises KeyError when none does."""
        for group in self.groups:
            if layer_id in group.layer_ids:
                return group
        raise KeyError(f"no layer group holds layer {layer_id}")

    def as_single_pool_tensor(self) -> torch.Tensor | None:
        """The view `[num_blocks, num_layers, kv_factor, block_size]`, or None where no tensor describes the cache.

        None for several groups, several regions, replicated regions, or buffers of unequal number per layer.
        """
        if len(self.groups) != 1 or len(self.groups[0].regions) != 1:
            return None
        group, region = self.groups[0], self.groups[0].regions[0]
        layers, buffers = len(group.layer_ids), len(region.buffers)
        replicated = getattr(group, "replicated_regions", ())
        if replicated or buffers % layers or any(buffer.expansion != 1 for buffer in region.buffers):
            return None
        if region.size % (self.dtype.itemsize * buffers):
            return None
        block_size = region.size // self.dtype.itemsize // buffers
        flat = region.as_tensor(self.dtype)
        return flat.view(flat.shape[0], layers, buffers // layers, block_size)
