"""The runtime's base classes, from wherever this release of TensorRT-LLM keeps them.

Releases 1.0 to 1.2 have `pyexecutor.kv_cache_connector`, later ones `pyexecutor.connectors.kv_cache_connector`.
There is no fallback: a connector of any other base would be a connector that no runtime drives.
"""

from __future__ import annotations

import importlib
from typing import Any

MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


def base_classes() -> tuple[type[Any], type[Any]]:
    """`(KvCacheConnectorScheduler, KvCacheConnectorWorker)`. Raises ImportError, one sentence, without either."""
    causes: list[ImportError] = []
    for path in MODULES:
        try:
            module = importlib.import_module(path)
            return module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker
        except ImportError as error:
            causes.append(error)
    # A release that has the module and fails inside it (a missing CUDA library, say) is told by its own reason.
    reason = next((error for error in causes if not _is_absence(error)), causes[-1])
    raise ImportError(f"s3kv.connector needs TensorRT-LLM 1.0 or later, which cannot be imported: {reason}") from reason


def _is_absence(error: ImportError) -> bool:
    return isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("tensorrt_llm")
