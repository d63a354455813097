"""One description of every paged cache: groups of regions, each a run of bytes that repeats once a page.

Where a region lies in a slot of host memory is decided here too (`places`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from s3kv.connector.strips import Strip, tensor_at
from s3kv.errors import ConfigError
from s3kv.identity import REPLICATED, Buffer, GroupSpec, NamespaceSpec, RegionSpec


@dataclass(frozen=True)
class Region:
    """Row i of `strip` is the region's bytes of page i. `replicated`: the same on every shard."""

    strip: Strip
    replicated: bool
    buffers: tuple[Buffer, ...]

    @property
    def size(self) -> int:
        return self.strip.size


@dataclass(frozen=True)
class Group:
    """A layer group. Regions in memory order."""

    layers: tuple[int, ...]
    window: int | None
    regions: tuple[Region, ...]

    def spec(self) -> GroupSpec:
        return GroupSpec(
            self.layers, self.window, tuple(RegionSpec(r.size, r.replicated, r.buffers) for r in self.regions)
        )


@dataclass(frozen=True)
class PagedCache:
    """The registered cache. `tokens_per_block` is None where the runtime's tensor does not tell it."""

    groups: tuple[Group, ...]
    tokens_per_block: int | None
    dtype: str

    @property
    def device(self) -> torch.device:
        return self.groups[0].regions[0].strip.view.device

    @property
    def sharded(self) -> bool:
        return any(not region.replicated for group in self.groups for region in group.regions)

    def specs(self) -> tuple[GroupSpec, ...]:
        return tuple(group.spec() for group in self.groups)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one region of one group lies in a slot of one part."""

    group: int
    region: Region
    part: int
    offset: int


def places(cache: PagedCache, namespace: NamespaceSpec, parts: Iterable[int]) -> list[Place]:
    """Where the regions that belong to `parts` lie in their slots: regions one after the other, in layout order."""
    found = []
    by_shard = {part.shard: part for part in namespace.parts}
    for shard in parts:
        for index, group in enumerate(cache.groups):
            offset = by_shard[shard].group_offset(index)
            for region in group.regions:
                if region.replicated == (shard == REPLICATED):
                    found.append(Place(index, region, shard, offset))
                    offset += region.size
    return found


def from_tensor(tensor: torch.Tensor, tokens_per_block: int | None = None) -> PagedCache:
    """V1's one pool, `[num_blocks, num_layers, kv_factor, block_size]`; dimension 1 is the model's layers in order.

    Raises ConfigError for another shape, or when a block's bytes are not contiguous.
    """
    if tensor.dim() != 4 or not tensor[0].is_contiguous():
        raise ConfigError(
            f"the registered KV cache has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}, and s3kv "
            "serves [num_blocks, num_layers, kv_factor, block_size] with contiguous blocks"
        )
    blocks, layers, factor, _ = tensor.shape
    roles = ("key", "value")[:factor] if factor <= 2 else tuple(str(index) for index in range(factor))
    buffers = tuple((layer, role, 1) for layer in range(layers) for role in roles)
    rows = tensor.as_strided((blocks, tensor[0].numel()), (tensor.stride(0), 1))
    # A cache without values is MLA's: one latent a token, the same on every rank (field report 18).
    region = Region(Strip.of(rows.view(torch.uint8)), factor == 1, buffers)
    return PagedCache((Group(tuple(range(layers)), None, (region,)),), tokens_per_block, dtype_name(tensor.dtype))


def from_layout(layout: Any, device: Callable[[], torch.device] | None = None) -> PagedCache:
    """V2's layout. `replicated_regions` may be missing or empty, and regions may have no `as_tensor`.

    `device`: whose memory an address is when a region cannot say it. Raises ConfigError when the layout cannot be read.
    """
    try:
        ordered = sorted(layout.groups, key=lambda group: int(group.layer_group_id))
        if [int(group.layer_group_id) for group in ordered] != list(range(len(ordered))) or not ordered:
            raise ConfigError("the registered KV cache layout has layer groups that are not numbered from 0 on")
        latent = _latent_layers(ordered)
        groups = tuple(_group(group, latent, device or _default_device) for group in ordered)
        tokens = int(layout.tokens_per_block)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"the registered KV cache layout cannot be read: {error}") from error
    return PagedCache(groups, tokens, dtype_name(getattr(layout, "dtype", None)))


def _group(group: Any, latent: set[int], device: Callable[[], torch.device]) -> Group:
    own = [(region, False) for region in group.regions]
    shared = [(region, True) for region in getattr(group, "replicated_regions", None) or ()]
    regions = tuple(_region(region, alike, latent, device) for region, alike in own + shared)
    window = getattr(group, "window_size", None)
    layers = tuple(int(layer) for layer in group.layer_ids)
    return Group(layers, None if window is None else int(window), regions)


def _region(region: Any, replicated: bool, latent: set[int], device: Callable[[], torch.device]) -> Region:
    buffers = tuple(_buffer(buffer) for buffer in region.buffers)
    alike = replicated or (bool(buffers) and all(layer in latent for layer, _, _ in buffers))
    base, size, stride, slots = int(region.base), int(region.size), int(region.stride), int(region.num_slots)
    if stride < size:
        raise ConfigError(f"a region of {size} bytes a page has a stride of {stride}: its pages overlap")
    view = region.as_tensor() if hasattr(region, "as_tensor") else tensor_at(base, size, stride, slots, device())
    if view.dtype is not torch.uint8 or tuple(view.shape) != (slots, size) or view.data_ptr() != base:
        raise ConfigError(f"a region of {slots} pages of {size} bytes at {base:#x} does not match its own tensor")
    return Region(Strip.of(view), alike, buffers)


def _buffer(buffer: Any) -> Buffer:
    """A named object in the releases seen, a `(layer_id, role, expansion)` tuple in the documentation."""
    if isinstance(buffer, Sequence):
        layer, role, *rest = buffer
        return int(layer), str(role), int(rest[0]) if rest else 1
    return int(buffer.layer_id), str(buffer.role), int(getattr(buffer, "expansion", 1))


def _latent_layers(groups: Sequence[Any]) -> set[int]:
    """Layers with keys and no values: MLA's one latent a token, computed alike on every rank (field report 18)."""
    roles: dict[int, set[str]] = {}
    for group in groups:
        for region in group.regions:
            for layer, role, _ in map(_buffer, region.buffers):
                roles.setdefault(layer, set()).add(role.lower())
    return {layer for layer, names in roles.items() if "key" in names and "value" not in names}


def _default_device() -> torch.device:
    """Addresses in a layout are device addresses; without a GPU they can only be the host's."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def dtype_name(dtype: Any) -> str:
    """`bfloat16` for torch.bfloat16; "" where the layout tells none."""
    return "" if dtype is None else str(dtype).rsplit(".", 1)[-1].lower()
