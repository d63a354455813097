"""A transformer of an 8B model's shape with random weights, over a paged V1 pool, for measurements of time.

Prefill computes whole chunks, decode a batch of sequences at once. It is the shape and the traffic that count here;
whether tokens are right is the matter of the differential tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True)
class Shape:
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 14336
    vocab: int = 32000
    block: int = 32

    @property
    def block_size(self) -> int:
        """Elements of one block in one layer's K or V: the last dimension of the pool."""
        return self.block * self.kv_heads * self.head_dim

    @property
    def block_bytes(self) -> int:
        return 2 * 2 * self.layers * self.block_size


class Model:
    """`pool`: bfloat16 `[num_blocks, layers, 2, block_size]`."""

    def __init__(self, shape: Shape, num_blocks: int) -> None:
        self.shape = shape
        generator = torch.Generator("cuda").manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            made = torch.empty((rows, columns), dtype=torch.bfloat16, device="cuda")
            return made.normal_(0, columns**-0.5, generator=generator)

        kv = shape.kv_heads * shape.head_dim
        self.embedding = weight(shape.vocab, shape.hidden)
        self.qkv = [weight(shape.heads * shape.head_dim + 2 * kv, shape.hidden) for _ in range(shape.layers)]
        self.out = [weight(shape.hidden, shape.heads * shape.head_dim) for _ in range(shape.layers)]
        self.gate_up = [weight(2 * shape.mlp, shape.hidden) for _ in range(shape.layers)]
        self.down = [weight(shape.hidden, shape.mlp) for _ in range(shape.layers)]
        self.pool = torch.zeros((num_blocks, shape.layers, 2, shape.block_size), dtype=torch.bfloat16, device="cuda")

    def prefill(self, tokens: torch.Tensor, past: int, pages: torch.Tensor) -> torch.Tensor:
        """Compute `tokens` (whole blocks, or a prompt's rest) behind `past` (whole blocks); returns the next token."""
        shape, count = self.shape, tokens.shape[0]
        state = self.embedding[tokens]
        end = past + count
        blocks = -(-end // shape.block)
        own = pages[past // shape.block : blocks]
        pad = own.shape[0] * shape.block - count
        for layer in range(shape.layers):
            query, key, value = self._project(layer, state)
            for kind, fresh in ((0, key), (1, value)):
                whole = functional.pad(fresh, (0, 0, 0, 0, 0, pad)) if pad else fresh
                self.pool[own, layer, kind] = whole.reshape(own.shape[0], shape.block_size)
            keys, values = (self._history(layer, kind, pages[:blocks], end) for kind in (0, 1))
            repeat = shape.heads // shape.kv_heads
            attended = functional.scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                keys.transpose(0, 1)[None].repeat_interleave(repeat, 1),
                values.transpose(0, 1)[None].repeat_interleave(repeat, 1),
                attn_mask=causal_lower_right(count, end),
            )
            state = self._rest(layer, state, attended[0].transpose(0, 1).reshape(count, -1))
        return (state[-1] @ self.embedding.t()).argmax()

    def decode(self, tokens: torch.Tensor, position: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """One token for each of `tokens.shape[0]` sequences. `pages` `[sequences, blocks]`, all of one length."""
        shape, batch = self.shape, tokens.shape[0]
        state = self.embedding[tokens]
        block = pages.gather(1, (position // shape.block)[:, None])[:, 0]
        offset = position % shape.block
        reach = torch.arange(pages.shape[1] * shape.block, device="cuda")
        hidden = reach[None, :] > position[:, None]
        view = self.pool.view(-1, shape.layers, 2, shape.block, shape.kv_heads, shape.head_dim)
        for layer in range(shape.layers):
            query, key, value = self._project(layer, state)
            view[block, layer, 0, offset] = key
            view[block, layer, 1, offset] = value
            keys = view[pages, layer, 0].reshape(batch, -1, shape.kv_heads, shape.head_dim)
            values = view[pages, layer, 1].reshape(batch, -1, shape.kv_heads, shape.head_dim)
            grouped = query.view(batch, shape.kv_heads, -1, shape.head_dim)
            scores = torch.einsum("bkgd,bskd->bkgs", grouped, keys) * shape.head_dim**-0.5
            scores.masked_fill_(hidden[:, None, None, :], float("-inf"))
            attended = torch.einsum("bkgs,bskd->bkgd", scores.softmax(-1), values)
            state = self._rest(layer, state, attended.reshape(batch, -1))
        return (state @ self.embedding.t()).argmax(-1)

    def _project(self, layer: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = self.shape
        mixed = functional.rms_norm(state, (shape.hidden,)) @ self.qkv[layer].t()
        kv = shape.kv_heads * shape.head_dim
        query, key, value = mixed.split([shape.heads * shape.head_dim, kv, kv], -1)
        per_head = (state.shape[0], -1, shape.head_dim)
        return query.reshape(per_head), key.reshape(per_head), value.reshape(per_head)

    def _history(self, layer: int, kind: int, pages: torch.Tensor, end: int) -> torch.Tensor:
        shape = self.shape
        return self.pool[pages, layer, kind].view(-1, shape.kv_heads, shape.head_dim)[:end]

    def _rest(self, layer: int, state: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        state = state + attended @ self.out[layer].t()
        gate, up = (functional.rms_norm(state, (self.shape.hidden,)) @ self.gate_up[layer].t()).chunk(2, -1)
        return state + (functional.silu(gate) * up) @ self.down[layer].t()
