"""KV bytes to measure on: from a real forward pass of the simulated model, and a synthetic distribution.

Synthetic: bf16, normal, one scale a channel (log-normal, sigma 1) that all tokens share, as keys and values have.
"""

from __future__ import annotations

import numpy as np
import torch

from s3kv.sim.config import SimConfig, SimRequest
from s3kv.sim.engine import Engine
from s3kv.sim.shape import ModelShape

CHANNELS = 128
TOKENS_PER_BLOCK = 32


def real_pages(tokens: int = 1024, layers: int = 8) -> list[bytes]:
    """bf16 pages of 64 KiB a layer, K and V of 8 heads of 64 channels, of a prompt of `tokens` tokens."""
    shape = ModelShape(
        num_layers=layers, hidden=512, num_heads=8, num_kv_heads=8, head_dim=64, mlp=1024, windows=(None,)
    )
    config = SimConfig(
        model=shape,
        kv_dtype="bfloat16",
        compute_dtype="float32",
        tokens_per_block=TOKENS_PER_BLOCK,
        num_pages=tokens // TOKENS_PER_BLOCK + 2,
        poison="nan",
        max_num_tokens=max(8192, tokens),
    )
    text = np.random.default_rng(3).integers(0, 256, tokens).tolist()
    with Engine(config) as engine:
        engine.generate([SimRequest(request_id=1, prompt_tokens=tuple(text), max_new_tokens=1)])
        memories = [memory for pool in engine.executors[0].manager.pools for memory in pool.memories()]
        return [row.numpy().tobytes() for memory in memories for row in memory if not bool((row == 0xFF).all())]


def synthetic_pages(pages: int, page_bytes: int, seed: int = 4) -> list[bytes]:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(CHANNELS, generator=generator).exp()
    shape = (pages, page_bytes // 2 // CHANNELS, CHANNELS)
    values = (torch.randn(shape, generator=generator) * scales).to(torch.bfloat16)
    return [bytes(page.contiguous().view(torch.uint8).numpy().tobytes()) for page in values]
