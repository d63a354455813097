"""The two cache managers: which pages a request has, in every layer group, at every moment.

V1 is one pool, `[num_blocks, num_layers, kv_factor, block_size]`, where a request gets the pages of its whole prompt at
once and a window frees nothing. V2 is a pool for every attention window, where pages come with the chunk that needs
them and a page that the window has passed is freed when the next pass is prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from s3kv.sim.layout import (
    BAD_PAGE_INDEX,
    KvCacheLayerGroupLayout,
    KvCacheLayout,
    PlainLayerGroupLayout,
)
from s3kv.sim.model import LayerViews
from s3kv.sim.pool import PagePool
from s3kv.sim.reuse import BlockKey, Match, Node, ReuseTree, first_needed
from s3kv.sim.shape import KV_DTYPES, ModelShape, layer_buffers

Replicated = Literal["absent", "empty", "used"]


@dataclass(frozen=True)
class CacheShape:
    """How the paged cache is laid out.

    num_pages: page slots in every layer group. padding_bytes: unused bytes after every slot (V2).
    replicated: whether layouts have `replicated_regions` at all, have them empty, or use them for what is alike on
    every rank: index keys, and latents. Without "used" such bytes are among the ordinary regions.
    """

    model: ModelShape
    kv_dtype: str = "float32"
    tokens_per_block: int = 16
    num_pages: int = 512
    padding_bytes: int = 0
    replicated: Replicated = "used"
    poison: str = "nan"
    tp_size: int = 1


@dataclass
class RequestPages:
    """The pages of one request: `pages[g]` by block ordinal, -1 where group g has none."""

    scope: object
    pages: list[list[int]]
    node: Node
    committed: int = 0
    trimmed: list[int] = field(default_factory=list)


class CacheManager:
    """What both managers share. Every call is cheap and none waits for the device."""

    def __init__(
        self, shape: CacheShape, groups: list[list[int]], *, reuse: bool, partial: bool, device: torch.device
    ) -> None:
        self.shape, self.groups, self.reuse = shape, groups, reuse
        self.tokens_per_block = shape.tokens_per_block
        self.pools = [self._make_pool(layers, device) for layers in groups]
        self._tree = ReuseTree(self.pools, shape.tokens_per_block, partial=partial)
        self._sequences: dict[int, RequestPages] = {}

    def views(self) -> list[LayerViews]:
        """By layer, views by role into the pools."""
        by_layer = {layer: views for pool in self.pools for layer, views in pool.views().items()}
        return [by_layer[layer] for layer in range(self.shape.model.num_layers)]

    def group_of_layer(self, layer: int) -> int:
        """The layer group that holds a layer."""
        return next(group for group, layers in enumerate(self.groups) if layer in layers)

    def lookup(self, scope: object, keys: Sequence[BlockKey], tail: BlockKey, limit: int) -> Match:
        """What the device holds of a prompt; nothing with reuse off."""
        return self._tree.match(scope, keys, tail, limit) if self.reuse and scope is not None else Match()

    def begin(self, request_id: int, scope: object, match: Match) -> bool:
        """Gives a request the pages of its match: whole blocks are shared, a partly matching block is copied.

        False, with nothing changed, when there is no room for the copy.
        """
        root = self._tree.root(scope)
        sequence = RequestPages(scope, [[] for _ in self.pools], root, trimmed=[0] * len(self.pools))
        self._sequences[request_id] = sequence
        for group, pool in enumerate(self.pools):
            first = first_needed(match.tokens, pool.window, self.tokens_per_block)
            for ordinal, node in enumerate(match.nodes):
                page = node.pages[group] if ordinal >= first else BAD_PAGE_INDEX
                if page != BAD_PAGE_INDEX:
                    pool.refer(page)
                sequence.pages[group].append(page)
            sequence.trimmed[group] = min(first, len(match.nodes))
        if match.nodes:
            sequence.node, sequence.committed = match.nodes[-1], len(match.nodes)
        if match.partial is not None and not self._copy_partial(sequence, match.partial):
            self.release(request_id)
            return False
        return True

    def grow(self, request_id: int, end: int, history: int) -> bool:
        """Makes sure of pages for the tokens `[history, end)` and for what queries from `history` on look at.

        Blocks that a window has passed by then get no page. False, with nothing changed, when there is no room.
        """
        sequence, blocks = self._sequences[request_id], -(-end // self.tokens_per_block)
        wanted = []
        for group, pool in enumerate(self.pools):
            first = first_needed(history, pool.window, self.tokens_per_block)
            have = len(sequence.pages[group])
            wanted.append([ordinal >= first for ordinal in range(have, blocks)])
            if sum(wanted[-1]) > pool.available:
                return False
        for group, pool in enumerate(self.pools):
            sequence.pages[group].extend(pool.take() if need else BAD_PAGE_INDEX for need in wanted[group])
        return True

    def shrink(self, request_id: int, end: int) -> None:
        """Gives back the pages of the blocks from `end` on, when a pass is not run after all."""
        sequence, blocks = self._sequences[request_id], -(-end // self.tokens_per_block)
        for group, pool in enumerate(self.pools):
            pages = sequence.pages[group]
            pool.drop(page for page in reversed(pages[blocks:]) if page != BAD_PAGE_INDEX)
            del pages[blocks:]

    def trim(self, request_id: int, position: int) -> None:
        """Frees the pages that no query from `position` on looks at. V1 frees none."""

    def commit(self, request_id: int, keys: Sequence[BlockKey]) -> None:
        """Records the sequence's complete blocks, of which `keys` names all, for reuse."""
        sequence = self._sequences[request_id]
        if not self.reuse or sequence.scope is None:
            return
        for ordinal in range(sequence.committed, len(keys)):
            pages = [group[ordinal] for group in sequence.pages]
            sequence.node = self._tree.insert(sequence.node, keys[ordinal], pages)
        sequence.committed = max(sequence.committed, len(keys))

    def release(self, request_id: int, *, destroy: bool = False) -> None:
        """Takes a request's pages away. Blocks committed before stay for reuse while there is room.

        destroy: nothing stays that no other request uses, and the slots are the last to be handed out again.
        """
        sequence = self._sequences.pop(request_id)
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            pool.drop([page for page in reversed(pages) if page != BAD_PAGE_INDEX], keep=not destroy, last=destroy)

    def reset_reuse(self) -> None:
        """Forgets every block that no request uses, as TensorRT-LLM's reset of the reuse state does."""
        for pool in self.pools:
            pool.evict_all()

    def pages(self, request_id: int) -> list[list[int]]:
        """Copies of a request's page lists by layer group; empty lists for a request that has none."""
        sequence = self._sequences.get(request_id)
        return [list(pages) for pages in sequence.pages] if sequence else [[] for _ in self.pools]

    def pages_held(self, request_id: int) -> int:
        """The most pages that a request has in any one group."""
        lists = self.pages(request_id)
        return max(sum(page != BAD_PAGE_INDEX for page in pages) for pages in lists)

    @property
    def requests(self) -> list[int]:
        """The requests that have pages."""
        return list(self._sequences)

    def _copy_partial(self, sequence: RequestPages, source: Node) -> bool:
        pages = list(source.pages)
        for pool, page in zip(self.pools, pages, strict=True):
            pool.refer(page)
        room = all(pool.available for pool in self.pools)
        for group, (pool, page) in enumerate(zip(self.pools, pages, strict=True)):
            if room:
                target = pool.take()
                pool.copy(page, target)
                sequence.pages[group].append(target)
            pool.drop([page])
        return room

    def _make_pool(self, layers: list[int], device: torch.device) -> PagePool:
        shape = self.shape
        latent_replicated = shape.replicated == "used"
        buffers = [
            spec
            for layer in layers
            for spec in layer_buffers(
                shape.model, layer, shape.tokens_per_block, KV_DTYPES[shape.kv_dtype], shape.tp_size, latent_replicated
            )
        ]
        return PagePool(
            buffers,
            shape.num_pages,
            window=self._pool_window(layers),
            padding_bytes=shape.padding_bytes,
            poison=shape.poison,
            device=device,
        )

    def _pool_window(self, layers: list[int]) -> int | None:
        raise NotImplementedError


class ManagerV1(CacheManager):
    """One pool for all layers; windows are masks only. Raises ValueError for what one tensor cannot hold."""

    def __init__(self, shape: CacheShape, *, reuse: bool, partial: bool, device: torch.device) -> None:
        model = shape.model
        latent = set(model.latent_layers) & set(range(model.num_layers))
        if latent and len(latent) < model.num_layers:
            raise ValueError('manager="v1" holds latent layers only when all layers are latent')
        if model.wide_layers or model.index_dim or model.block_scales or shape.padding_bytes:
            raise ValueError('manager="v1" has one region: no wide layers, index keys, block scales or padding')
        super().__init__(shape, [list(range(model.num_layers))], reuse=reuse, partial=partial, device=device)

    def tensor(self) -> torch.Tensor:
        """The pool, `[num_blocks, num_layers, kv_factor, block_size]` in the KV dtype."""
        shape = self.shape
        kv_factor = 1 if shape.model.latent_layers else 2
        flat = self.pools[0].memories()[0].view(KV_DTYPES[shape.kv_dtype])
        return flat.view(shape.num_pages, shape.model.num_layers, kv_factor, -1)

    def _pool_window(self, layers: list[int]) -> int | None:
        return None


class ManagerV2(CacheManager):
    """One pool for every attention window."""

    def __init__(self, shape: CacheShape, *, reuse: bool, partial: bool, device: torch.device) -> None:
        by_window: dict[int | None, list[int]] = {}
        for layer in range(shape.model.num_layers):
            by_window.setdefault(shape.model.window(layer), []).append(layer)
        super().__init__(shape, list(by_window.values()), reuse=reuse, partial=partial, device=device)

    def trim(self, request_id: int, position: int) -> None:
        """Frees the pages that no query from `position` on looks at, whether or not the reuse tree knows them."""
        sequence = self._sequences[request_id]
        for group, pool in enumerate(self.pools):
            pages = sequence.pages[group]
            first = min(first_needed(position, pool.window, self.tokens_per_block), len(pages))
            passed = range(sequence.trimmed[group], first)
            pool.drop((pages[ordinal] for ordinal in passed if pages[ordinal] != BAD_PAGE_INDEX), keep=False)
            for ordinal in passed:
                pages[ordinal] = BAD_PAGE_INDEX
            sequence.trimmed[group] = max(sequence.trimmed[group], first)

    def layout(self) -> KvCacheLayout:
        """The description that a connector is handed."""
        groups = [self._group_layout(group, layers) for group, layers in enumerate(self.groups)]
        return KvCacheLayout(self.tokens_per_block, tuple(groups), KV_DTYPES[self.shape.kv_dtype])

    def _group_layout(self, group: int, layers: list[int]) -> PlainLayerGroupLayout:
        pool, kind = self.pools[group], self.shape.replicated
        sharded, replicated = pool.regions(), pool.regions(replicated=True)
        if kind == "absent":
            return PlainLayerGroupLayout(group, tuple(layers), pool.window, sharded + replicated)
        if kind == "empty":
            return KvCacheLayerGroupLayout(group, tuple(layers), pool.window, sharded + replicated, ())
        return KvCacheLayerGroupLayout(group, tuple(layers), pool.window, sharded, replicated)

    def _pool_window(self, layers: list[int]) -> int | None:
        return self.shape.model.window(layers[0])
