"""Arguments of the runtime that change the KV bytes of equal tokens, and that neither weights nor layout tell.

Each is part of the namespace only where it is set to something other than what changes nothing, so that servers which
leave it alone keep theirs. What cannot be read exactly is told apart rather than overlooked: that costs a miss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from s3kv.connector.layout import PagedCache

_OPTIONS = (
    "attn_backend",
    "model_kwargs",  # overrides of the checkpoint's configuration, rope and its scaling among them
    "sparse_attention_config",
    "force_dynamic_quantization",
    "video_pruning_rate",
    "kv_cache_config.sink_token_length",
    "moe_config.use_low_precision_moe_combine",
)
"""Dotted names of arguments of which unset, False and 0 change nothing."""

_DTYPES = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
}


def runtime_extra(llm_args: Any, cache: PagedCache, folder: Path | None) -> list[tuple[str, str]]:
    """`folder`: the checkpoint's, None where it is not on this machine. For `NamespaceSpec.extra`."""
    config = checkpoint_config(folder)
    found = [(name, _text(value)) for name in _OPTIONS if (value := _argument(llm_args, name))]
    # With made-up weights the bytes are not the checkpoint's.
    if _word(_argument(llm_args, "load_format")) == "dummy":
        found.append(("load_format", "dummy"))
    if _word(_argument(llm_args, "allreduce_strategy")) == "lowprecision":
        found.append(("allreduce_strategy", "lowprecision"))
    if (dtype := dtype_of(_argument(llm_args, "dtype"))) not in ("", _checkpoint_dtype(config)):
        found.append(("dtype", dtype))
    # Where the checkpoint says how it is quantized, its fingerprint covers that, and the runtime copies it here.
    stated = "quantization_config" in config or (folder is not None and (folder / "hf_quant_config.json").is_file())
    if not stated and (spared := _argument(llm_args, "quant_config.exclude_modules")):
        found.append(("quant_config.exclude_modules", _text(spared)))
    # V2's layout has the windows of its groups. V1's tensor, which does not even tell the block size, has none.
    if cache.tokens_per_block is None and (windows := _argument(llm_args, "kv_cache_config.max_attention_window")):
        found.append(("kv_cache_config.max_attention_window", _text(_by_layer(windows, cache))))
    return found


def _by_layer(windows: Any, cache: PagedCache) -> Any:
    """The runtime repeats a shorter list over the layers, so `[1024]` and `[1024, 1024]` are the same."""
    if isinstance(windows, int):
        windows = [windows]
    if not isinstance(windows, list | tuple):
        return windows
    return [windows[layer % len(windows)] for group in cache.groups for layer in range(len(group.layers))]


def _argument(llm_args: Any, name: str) -> Any:
    """None where a release does not have it."""
    value = llm_args
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _word(value: Any) -> str:
    """Enumerations are compared by name, whichever kind a release has."""
    return str(getattr(value, "name", value)).rsplit(".", 1)[-1].lower()


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    """A settings model by its fields; anything else by its text."""
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if dump is not None else str(value)


def dtype_of(value: Any) -> str:
    """`bfloat16` for "bf16", "torch.bfloat16" and the like; "" for what leaves the choice to the checkpoint."""
    stated = str(value or "auto").rsplit(".", 1)[-1].lower()
    return "" if stated == "auto" else _DTYPES.get(stated, stated)


def checkpoint_dtype(folder: Path | None) -> str:
    """The type that the checkpoint's configuration names; "" where it names none, or is not on this machine."""
    return _checkpoint_dtype(checkpoint_config(folder))


def _checkpoint_dtype(config: dict[str, Any]) -> str:
    return dtype_of(config.get("torch_dtype") or config.get("dtype"))


def checkpoint_config(folder: Path | None) -> dict[str, Any]:
    """`config.json`; empty where it is missing or no object."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
