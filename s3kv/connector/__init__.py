"""TensorRT-LLM's scheduler and worker, and the copies between KV pages and host slots.

Name them in the LLM arguments:

    kv_connector_config:
      connector_module: s3kv.connector
      connector_scheduler_class: S3KVScheduler
      connector_worker_class: S3KVWorker

The two classes derive from the runtime's own and are made when first asked for, so that everything pure in this package
can be imported, and tested, without tensorrt_llm. Importing it initialises no CUDA context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s3kv.connector.scheduler import SchedulerShell as S3KVScheduler
    from s3kv.connector.worker import WorkerShell as S3KVWorker

__all__ = ["S3KVScheduler", "S3KVWorker"]

_made: dict[tuple[str, type], type] = {}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from s3kv.connector.bases import base_classes

    scheduler_base, worker_base = base_classes()
    if name == "S3KVScheduler":
        from s3kv.connector.scheduler import SchedulerShell

        return _on_base(name, SchedulerShell, scheduler_base)
    from s3kv.connector.worker import WorkerShell

    return _on_base(name, WorkerShell, worker_base)


def _on_base(name: str, shell: type, base: type) -> type:
    """One class for each base, so that asking twice gives the same one."""
    key = (name, base)
    if key not in _made:
        _made[key] = type(name, (shell, base), {"__doc__": shell.__doc__, "__module__": __name__})
    return _made[key]
