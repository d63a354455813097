"""The namespace of a registered cache: what, besides tokens, decides the meaning of its bytes."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from s3kv.connector.bringup import Placement, stated_tokens_per_block
from s3kv.connector.layout import PagedCache
from s3kv.connector.numerics import checkpoint_dtype, dtype_of, runtime_extra
from s3kv.errors import ConfigError
from s3kv.identity import NamespaceSpec, fingerprint_model
from s3kv.settings import IdentitySettings

logger = logging.getLogger("s3kv.connector")


def namespace_of(llm_args: Any, settings: IdentitySettings, cache: PagedCache, placement: Placement) -> NamespaceSpec:
    """Raises ConfigError, naming the setting, where the identity of the weights or the block size cannot be known."""
    folder = model_folder(llm_args)
    return NamespaceSpec(
        model=settings.model or _model_name(llm_args, folder),
        weights=settings.fingerprint or _fingerprint(llm_args, folder),
        kv_dtype=_kv_dtype(llm_args, cache),
        quantization=_quantization(llm_args),
        tokens_per_block=tokens_per_block(llm_args, cache),
        groups=cache.specs(),
        shards=placement.ranks if cache.sharded else 1,
        extra=(*settings.extra.items(), *runtime_extra(llm_args, cache, folder)),
    )


def tokens_per_block(llm_args: Any, cache: PagedCache) -> int:
    """What the registered cache says; only where it says nothing, what the arguments say (field report 2)."""
    stated = stated_tokens_per_block(llm_args)
    if cache.tokens_per_block is not None:
        if stated is not None and stated != cache.tokens_per_block:
            logger.warning(
                "kv_cache_config.tokens_per_block is %d and the KV cache has %d tokens a block: s3kv uses %d",
                stated, cache.tokens_per_block, cache.tokens_per_block,
            )  # fmt: skip
        return cache.tokens_per_block
    if stated is None:
        raise ConfigError(
            "the registered KV cache does not tell its tokens per block: set kv_cache_config.tokens_per_block"
        )
    return stated


def model_folder(llm_args: Any) -> Path | None:
    """The checkpoint's folder, also where Hugging Face's cache has it; None where it is not on this machine."""
    model = getattr(llm_args, "model", None)
    if model is None:
        return None
    path = Path(str(model))
    if path.is_dir():
        return path
    hub = _hub_cache()
    if hub is None:
        return None
    repository = hub / f"models--{str(model).replace('/', '--')}"
    try:
        revision = str(getattr(llm_args, "revision", None) or "main")
        reference = repository / "refs" / revision
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
        snapshot = repository / "snapshots" / commit
        return snapshot if snapshot.is_dir() else None
    except (OSError, ValueError):
        return None


def _hub_cache() -> Path | None:
    """None for a user without a home: containers run under ids that no user has."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    try:
        return Path.home() / ".cache" / "huggingface" / "hub"
    except RuntimeError:
        return None


def _model_name(llm_args: Any, folder: Path | None) -> str:
    """Not the path: machines keep one checkpoint in different places, and the fingerprint tells checkpoints apart."""
    model = str(getattr(llm_args, "model", "") or "")
    return folder.name if folder is not None and Path(model) == folder else model


def _fingerprint(llm_args: Any, folder: Path | None) -> str:
    if folder is None:
        raise ConfigError(
            f"the checkpoint of model {getattr(llm_args, 'model', None)!r} is not on this machine, so its weights "
            "cannot be told from others: set identity.fingerprint (s3kv fingerprint MODEL_DIR prints it)"
        )
    return fingerprint_model(folder)


def _kv_dtype(llm_args: Any, cache: PagedCache) -> str:
    """The layout's own type; where it only says bytes, the arguments' or the checkpoint's."""
    if cache.dtype not in ("", "uint8", "int8"):
        return cache.dtype
    stated = dtype_of(getattr(getattr(llm_args, "kv_cache_config", None), "dtype", None))
    return stated or checkpoint_dtype(model_folder(llm_args)) or cache.dtype or "auto"


def _quantization(llm_args: Any) -> str:
    config = getattr(llm_args, "quant_config", None)
    names = [getattr(config, name, None) for name in ("quant_algo", "kv_cache_quant_algo")]
    texts = [str(getattr(name, "value", name)) for name in names if name is not None]
    return json.dumps(texts) if texts else ""
