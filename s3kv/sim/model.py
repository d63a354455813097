"""A small real transformer whose attention reads keys and values from the paged pool alone.

New keys and values are written to their pages first; then the pages are gathered. So a page that was loaded wrongly,
not loaded, or handed to somebody else gives wrong tokens.

Results must not depend on how a prefix came to be in the cache or on how a prompt was cut into chunks. Matrix kernels
add up in an order that depends on the shapes, so everything is computed in float64 and rounded once, when keys and
values are written: what is left of the differences is some 1e-16, far below the gap between two tokens' scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from s3kv.sim.shape import ModelShape
from s3kv.sim.streams import send
from s3kv.sim.weights import WeightFactory, random_matrix

QUERY_TILE = 256
"""Queries attended at once: bounds memory, and skips most of the masked half."""

LayerViews = Mapping[str, torch.Tensor]
"""By role, a view `[num_slots, *page shape]` into the pool."""

AllReduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Media:
    """Media content that stands in for the embeddings of `length` tokens from `position` on."""

    position: int
    length: int
    content: str


@dataclass(frozen=True)
class Identity:
    """What besides tokens decides a request's keys and values.

    A real cache salt changes no values. Here it does (as a bias of the embeddings), so that KV served across salts
    shows in the tokens.
    """

    adapter: str | None = None
    salt: str | None = None
    media: tuple[Media, ...] = ()


@dataclass
class Span:
    """The part of one request that one pass computes: `tokens` at positions from `start` on.

    pages: for each layer, the request's page slots by block ordinal, int64 on the device; -1 where there is no page.
    """

    tokens: torch.Tensor
    start: int
    pages: Sequence[torch.Tensor]
    identity: Identity = field(default_factory=Identity)

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.start + self.tokens.shape[0]


class Model:
    """One rank's share of the transformer. Not thread-safe; nothing in it waits for the device."""

    def __init__(
        self,
        shape: ModelShape,
        views: Sequence[LayerViews],
        *,
        tokens_per_block: int,
        seed: int,
        rank: int = 0,
        tp_size: int = 1,
        all_reduce: AllReduce = lambda tensor: tensor,
        device: torch.device = torch.device("cpu"),
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self._shape, self._views, self._block = shape, views, tokens_per_block
        self._all_reduce, self._device, self._dtype, self._seed = all_reduce, device, dtype, seed
        self._factory = WeightFactory(shape, seed, rank, tp_size, device, dtype)
        self._layers = [self._factory.layer(layer) for layer in range(shape.num_layers)]
        self._embedding = random_matrix(shape.hidden, shape.vocab, shape.hidden**0.5, seed, "embedding").T
        self._embedding = self._embedding.to(device, dtype).contiguous()
        self._output = self._factory.matrix(shape.hidden, shape.vocab, 3.0, "output")
        self._adapters: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._biases: dict[str, torch.Tensor] = {}
        exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        self._frequencies = (10000.0**-exponent).to(device)

    def embed(self, span: Span) -> torch.Tensor:
        """Embeddings `[tokens, hidden]` of a span, with its salt and media."""
        hidden = self._embedding[span.tokens]
        if span.identity.salt is not None:
            hidden = hidden + self._bias("salt", span.identity.salt)
        for media in span.identity.media:
            first, last = max(media.position, span.start), min(media.position + media.length, span.end)
            if first < last:
                hidden[first - span.start : last - span.start] = self._bias("media", media.content) * 2
        return hidden

    def layer(self, layer: int, hidden: torch.Tensor, span: Span) -> torch.Tensor:
        """One layer over one span: `[tokens, hidden]` to the same."""
        weights = self._layers[layer]
        normed = _rms_norm(hidden)
        self._write(layer, normed, span)
        attended = self._attend(layer, normed, span)
        hidden = hidden + self._all_reduce(attended @ weights.o)
        normed = _rms_norm(hidden)
        gated = functional.silu(normed @ weights.gate) * (normed @ weights.up)
        return hidden + self._all_reduce(gated @ weights.down)

    def sample(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The greedy next token after a span, int64 `[1]`, and its score, `[1]`; both on the device."""
        logits = _rms_norm(hidden[-1:]) @ self._output
        score, token = logits.max(dim=-1)
        return token, score

    def _bias(self, kind: str, name: str) -> torch.Tensor:
        key = f"{kind}:{name}"
        if key not in self._biases:
            row = random_matrix(1, self._shape.hidden, 0.7, self._seed, kind, name)
            self._biases[key] = send(row.to(self._dtype), self._device)
        return self._biases[key]

    def _project(self, layer: int, normed: torch.Tensor, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[tokens, columns]` as projected; for a latent layer the latent, twice."""
        weights = self._layers[layer]
        if weights.latent is not None:
            keys = values = normed @ weights.latent
        else:
            keys, values = normed @ weights.k, normed @ weights.v
        if span.identity.adapter is not None:
            name = (span.identity.adapter, layer)
            if name not in self._adapters:
                self._adapters[name] = self._factory.adapter(*name)
            down, up_keys, up_values = self._adapters[name]
            keys, values = keys + normed @ down @ up_keys, values + normed @ down @ up_values
        return keys, values

    def _write(self, layer: int, normed: torch.Tensor, span: Span) -> None:
        views, count = self._views[layer], span.tokens.shape[0]
        positions = torch.arange(span.start, span.end, device=self._device)
        pages, offsets = span.pages[layer][positions // self._block], positions % self._block
        keys, values = self._project(layer, normed, span)
        index_k = self._layers[layer].index_k
        if index_k is not None:
            views["index_key"][pages, offsets] = (normed @ index_k).to(views["index_key"].dtype)
        if layer in self._shape.latent_layers:
            views["key"][pages, :, offsets] = keys.view(count, 1, -1).to(views["key"].dtype)
            return
        keys = self._rotate(keys.view(count, -1, self._shape.head_dim), positions)
        for role, values_of_role in (("key", keys), ("value", values.view(count, -1, self._shape.head_dim))):
            if self._shape.block_scales:
                scale = values_of_role.abs().amax(-1).clamp_min(1e-6).float()
                views[f"{role}_block_scale"][pages, :, offsets] = scale
                values_of_role = values_of_role / scale.to(self._dtype)[..., None]
            views[role][pages, :, offsets] = values_of_role.to(views[role].dtype)

    def _read(self, layer: int, role: str, span: Span, first: int) -> torch.Tensor:
        """Positions `[first, span.end)` of a buffer, gathered from their pages: `[heads, positions, ...]`."""
        block = first // self._block
        pages = span.pages[layer][block : -(-span.end // self._block)]
        gathered = self._views[layer][role][pages].to(self._dtype)
        by_head = gathered.transpose(0, 1).flatten(1, 2)
        return by_head[:, first - block * self._block : span.end - block * self._block]

    def _keys_and_values(self, layer: int, span: Span, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights, shape = self._layers[layer], self._shape
        if layer in shape.latent_layers:
            latent = self._read(layer, "key", span, first)[0]
            positions = torch.arange(first, span.end, device=self._device)
            keys = (latent @ weights.k).view(latent.shape[0], -1, shape.head_dim)
            values = (latent @ weights.v).view(latent.shape[0], -1, shape.head_dim)
            return self._rotate(keys, positions).transpose(0, 1), values.transpose(0, 1)
        keys, values = (self._read(layer, role, span, first) for role in ("key", "value"))
        if shape.block_scales:
            keys = keys * self._read(layer, "key_block_scale", span, first)[..., None]
            values = values * self._read(layer, "value_block_scale", span, first)[..., None]
        groups = self._layers[layer].q.shape[1] // shape.head_dim // keys.shape[0]
        return keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)

    def _attend(self, layer: int, normed: torch.Tensor, span: Span) -> torch.Tensor:
        shape, weights, window = self._shape, self._layers[layer], self._shape.window(layer)
        positions = torch.arange(span.start, span.end, device=self._device)
        queries = (normed @ weights.q).view(len(positions), -1, shape.head_dim)
        queries = self._rotate(queries, positions).transpose(0, 1)
        first = 0 if window is None else max(0, span.start - window + 1)
        keys, values = self._keys_and_values(layer, span, first)
        bias = self._index_bias(layer, normed, span, first)
        tiles = []
        for low in range(span.start, span.end, QUERY_TILE):
            high = min(low + QUERY_TILE, span.end)
            left = 0 if window is None else max(0, low - window + 1)
            rows, columns = slice(low - span.start, high - span.start), slice(left - first, high - first)
            mask = self._mask(low, high, left, window)
            if bias is not None:
                mask = bias[rows, columns].masked_fill(~mask, -torch.inf)
            tiles.append(self._dot_product(queries[:, rows], keys[:, columns], values[:, columns], mask))
        return torch.cat(tiles, 1).transpose(0, 1).flatten(1)

    def _mask(self, low: int, high: int, left: int, window: int | None) -> torch.Tensor:
        """`[queries, keys]`, true where the query at `low + row` may look at the key at `left + column`."""
        query = torch.arange(low, high, device=self._device)[:, None]
        key = torch.arange(left, high, device=self._device)[None, :]
        mask = key <= query
        return mask if window is None else mask & (key > query - window)

    @staticmethod
    def _dot_product(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None, None])[0]

    def _index_bias(self, layer: int, normed: torch.Tensor, span: Span, first: int) -> torch.Tensor | None:
        """What the replicated index keys add to the scores of every head: `[tokens, positions]`."""
        index_q = self._layers[layer].index_q
        if index_q is None:
            return None
        block = first // self._block
        pages = span.pages[layer][block : -(-span.end // self._block)]
        keys = self._views[layer]["index_key"][pages].to(self._dtype).flatten(0, 1)
        keys = keys[first - block * self._block : span.end - block * self._block]
        scores: torch.Tensor = (normed @ index_q) @ keys.T
        return scores.div_(float(self._shape.index_dim) ** 0.5)

    def _rotate(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of `[tokens, heads, head_dim]`."""
        angles = positions[:, None].to(torch.float64) * self._frequencies
        cos, sin = (values.to(self._dtype)[:, None] for values in (angles.cos(), angles.sin()))
        first, second = vectors.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _rms_norm(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
