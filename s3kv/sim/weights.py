"""Weights from a seed: the same on every machine, process and rank, and sharded by slicing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from s3kv.sim.shape import ModelShape
from s3kv.sim.streams import send

ATTENTION_SHARPNESS = 1.7
"""Scale of queries and of keys. Blunt attention would average a wrong page away; this one shows it."""

ADAPTER_RANK = 4


def seeded(*parts: object) -> torch.Generator:
    """A generator whose stream depends on nothing but the parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def random_matrix(rows: int, columns: int, scale: float, *parts: object) -> torch.Tensor:
    """`[rows, columns]` float64 on the CPU, of standard deviation `scale / sqrt(rows)`."""
    values = torch.randn(rows, columns, generator=seeded(*parts), dtype=torch.float64)
    return values.mul_(scale / float(rows) ** 0.5)


@dataclass(frozen=True)
class LayerWeights:
    """One rank's share of a layer, in the compute dtype. For a latent layer `k` and `v` expand the latent."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    latent: torch.Tensor | None
    index_q: torch.Tensor | None
    index_k: torch.Tensor | None


class WeightFactory:
    """Makes one rank's weights on its device."""

    def __init__(
        self, shape: ModelShape, seed: int, rank: int, tp_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._shape, self._seed, self._rank, self._tp_size = shape, seed, rank, tp_size
        self._device, self._dtype = device, dtype

    def matrix(self, rows: int, columns: int, scale: float, *parts: object, split: int | None = None) -> torch.Tensor:
        """A weight matrix; `split` names the dimension that is shared out over the ranks."""
        full = random_matrix(rows, columns, scale, self._seed, *parts)
        if split is not None:
            full = full.chunk(self._tp_size, dim=split)[self._rank]
        return send(full.to(self._dtype).contiguous(), self._device)

    def layer(self, layer: int) -> LayerWeights:
        """This rank's share of one layer."""
        shape = self._shape
        queries, hidden = shape.num_heads * shape.head_dim, shape.hidden
        is_latent = layer in shape.latent_layers
        keys = queries if is_latent else shape.kv_heads(layer) * shape.head_dim
        source = shape.latent_dim if is_latent else hidden
        index = shape.index_dim
        return LayerWeights(
            q=self.matrix(hidden, queries, ATTENTION_SHARPNESS, layer, "q", split=1),
            k=self.matrix(source, keys, ATTENTION_SHARPNESS, layer, "k", split=1),
            v=self.matrix(source, keys, 1.0, layer, "v", split=1),
            o=self.matrix(queries, hidden, 1.5, layer, "o", split=0),
            gate=self.matrix(hidden, shape.mlp, 1.0, layer, "gate", split=1),
            up=self.matrix(hidden, shape.mlp, 1.0, layer, "up", split=1),
            down=self.matrix(shape.mlp, hidden, 1.0, layer, "down", split=0),
            latent=self.matrix(hidden, shape.latent_dim, 1.0, layer, "latent") if is_latent else None,
            index_q=self.matrix(hidden, index, 1.0, layer, "index_q") if index else None,
            index_k=self.matrix(hidden, index, 1.0, layer, "index_k") if index else None,
        )

    def adapter(self, name: str, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What an adapter adds to the key and value projections: `(down, up of keys, up of values)`."""
        shape = self._shape
        is_latent = layer in shape.latent_layers
        columns = shape.latent_dim if is_latent else shape.kv_heads(layer) * shape.head_dim
        split = None if is_latent else 1
        return (
            self.matrix(shape.hidden, ADAPTER_RANK, 1.0, "adapter", name, layer, "down"),
            self.matrix(ADAPTER_RANK, columns, 0.5, "adapter", name, layer, "key", split=split),
            self.matrix(ADAPTER_RANK, columns, 0.5, "adapter", name, layer, "value", split=split),
        )
