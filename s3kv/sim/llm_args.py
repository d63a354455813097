"""The LLM arguments that a connector is built with: the names that TensorRT-LLM's `TorchLlmArgs` has.

Only what a connector may read is here. `override` sets any of it to something else, to test refusals.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from s3kv.sim.config import ConnectorConfig, SimConfig

_DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
"""torch's name of a KV type to the one in `kv_cache_config.dtype`."""

_CHECKPOINTS = Path(__file__).parent / "checkpoints"


def make_llm_args(config: SimConfig, connector: ConnectorConfig, rank: int) -> SimpleNamespace:
    """The arguments as one rank sees them, with `config.llm_args` applied (dotted names to values)."""
    args = SimpleNamespace(
        model=_model(config.model_name),
        backend="pytorch",
        dtype="auto",
        tokens_per_block=None,
        tensor_parallel_size=config.tp_size,
        pipeline_parallel_size=1,
        context_parallel_size=1,
        gpus_per_node=8,
        moe_tensor_parallel_size=-1,
        moe_expert_parallel_size=-1,
        moe_cluster_parallel_size=-1,
        enable_attention_dp=config.attention_dp,
        max_beam_width=1,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=None,
        enable_chunked_prefill=config.chunk_tokens is not None,
        disable_overlap_scheduler=not config.overlap,
        speculative_config=None,
        sparse_attention_config=None,
        cache_transceiver_config=None,
        enable_lora=bool(config.adapters),
        lora_config=SimpleNamespace(lora_dir=list(config.adapters.values())) if config.adapters else None,
        quant_config=SimpleNamespace(quant_algo=None, kv_cache_quant_algo=None),
        scheduler_config=SimpleNamespace(capacity_scheduler_policy="GUARANTEED_NO_EVICT"),
        kv_cache_config=_kv_cache_config(config),
        kv_connector_config=connector,
        parallel_config=_parallel_config(config, rank),
    )
    override(args, config.llm_args)
    return args


def _model(name: str) -> str:
    """The checkpoint's folder, where there is one."""
    folder = _CHECKPOINTS / name
    return str(folder) if folder.is_dir() else name


def override(args: SimpleNamespace, values: Mapping[str, Any]) -> None:
    """Sets attributes by dotted name, such as `kv_cache_config.host_cache_size`."""
    for name, value in values.items():
        *path, last = name.split(".")
        target: Any = args
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)


def _kv_cache_config(config: SimConfig) -> SimpleNamespace:
    shape = config.model
    windows = [shape.window(layer) for layer in range(shape.num_layers)]
    limited = [window if window is not None else config.max_num_tokens for window in windows]
    return SimpleNamespace(
        enable_block_reuse=config.reuse,
        enable_partial_reuse=config.partial_reuse,
        copy_on_partial_reuse=True,
        tokens_per_block=config.tokens_per_block,
        dtype=_DTYPE_NAMES[config.kv_dtype],
        max_attention_window=limited if any(windows) else None,
        max_tokens=config.num_pages * config.tokens_per_block,
        free_gpu_memory_fraction=0.9,
        host_cache_size=None,
        disk_cache_size=None,
        use_kv_cache_manager_v2=config.manager == "v2",
        secondary_offload_min_priority=None,
    )


def _parallel_config(config: SimConfig, rank: int) -> SimpleNamespace:
    size = config.tp_size
    mapping = SimpleNamespace(
        rank=rank,
        world_size=size,
        tp_size=size,
        tp_rank=rank,
        pp_size=1,
        pp_rank=0,
        cp_size=1,
        cp_rank=0,
        gpus_per_node=8,
        local_rank=rank,
        node_rank=0,
        enable_attention_dp=config.attention_dp,
        dp_size=size if config.attention_dp else 1,
    )
    return SimpleNamespace(
        world_size=size,
        tp_size=size,
        pp_size=1,
        cp_size=1,
        gpus_per_node=8,
        enable_attention_dp=config.attention_dp,
        to_mapping=lambda: mapping,
    )
