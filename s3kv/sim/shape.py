"""The shape of the simulated model, and the KV buffers that one rank keeps for each of its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
LATENT_ROLE = "key"


@dataclass(frozen=True)
class ModelShape:
    """A small transformer: GQA, RoPE, RMSNorm, SwiGLU, greedy decoding.

    windows: attention window in tokens, by layer, repeated over the layers; None is full attention.
    wide_layers: layers with a KV head for every query head, so that their buffers are larger than the others'.
    latent_layers: layers that keep one latent vector a token and no value buffer (MLA), alike on every rank.
    index_dim: above zero, every layer also keeps a key computed from a replicated projection, alike on every rank.
    block_scales: keys and values are stored divided by a scale a token and head, the scales in buffers of their own.
    """

    num_layers: int = 4
    hidden: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 128
    vocab: int = 260
    windows: tuple[int | None, ...] = (None, 64)
    wide_layers: tuple[int, ...] = ()
    latent_layers: tuple[int, ...] = ()
    latent_dim: int = 32
    index_dim: int = 0
    block_scales: bool = False

    def window(self, layer: int) -> int | None:
        """The attention window of a layer in tokens, the token itself included; None for full attention."""
        return self.windows[layer % len(self.windows)]

    def kv_heads(self, layer: int) -> int:
        """KV heads of a layer over all ranks."""
        if layer in self.latent_layers:
            return 1
        return self.num_heads if layer in self.wide_layers else self.num_kv_heads

    def local_kv_heads(self, layer: int, tp_size: int) -> int:
        """KV heads of a layer on one rank. Raises ValueError when they cannot be split evenly."""
        heads = self.kv_heads(layer)
        if layer in self.latent_layers:
            return heads
        if heads % tp_size or self.num_heads % tp_size or self.mlp % tp_size:
            raise ValueError(f"tp_size {tp_size} does not divide the heads and the MLP of layer {layer}")
        return heads // tp_size


@dataclass(frozen=True)
class BufferSpec:
    """One KV buffer of one layer on one rank. `shape` is of one page, without the page dimension."""

    layer: int
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    replicated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer in one page."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def layer_buffers(
    shape: ModelShape, layer: int, tokens_per_block: int, dtype: torch.dtype, tp_size: int, latent_replicated: bool
) -> list[BufferSpec]:
    """The buffers of one layer on one rank, in memory order."""
    heads = shape.local_kv_heads(layer, tp_size)
    index = BufferSpec(layer, "index_key", (tokens_per_block, shape.index_dim), dtype, replicated=True)
    if layer in shape.latent_layers:
        latent = BufferSpec(layer, LATENT_ROLE, (1, tokens_per_block, shape.latent_dim), dtype, latent_replicated)
        return [latent, index] if shape.index_dim else [latent]
    page = (heads, tokens_per_block, shape.head_dim)
    buffers = [BufferSpec(layer, role, page, dtype) for role in ("key", "value")]
    if shape.index_dim:
        buffers.append(index)
    if shape.block_scales:
        scales = ("key_block_scale", "value_block_scale")
        buffers.extend(BufferSpec(layer, role, page[:2], torch.float32) for role in scales)
    return buffers
