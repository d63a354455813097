"""Puts the interface under TensorRT-LLM's module names, for tests and the demo: only when asked, and undone after.

`install()` refuses when the real `tensorrt_llm` is importable, so that it can never hide it.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

from s3kv.sim import interface, layout

Paths = Literal["old", "new", "both"]

_PYEXECUTOR = "tensorrt_llm._torch.pyexecutor"
OLD_CONNECTOR_MODULE = f"{_PYEXECUTOR}.kv_cache_connector"
NEW_CONNECTOR_MODULE = f"{_PYEXECUTOR}.connectors.kv_cache_connector"
NEW_LAYOUT_MODULE = f"{_PYEXECUTOR}.connectors.kv_cache_layout"


@dataclass(frozen=True)
class Installation:
    """What is installed now: under which paths, and whether in the shape of the early releases."""

    paths: Paths
    early: bool


class _RankOfThread(threading.local):
    """The rank of the calling thread: ranks are processes, or threads of one process in quick tests."""

    rank = 0
    size = 1


_rank_of_thread = _RankOfThread()
_installed: list[Installation] = []


def set_rank(rank: int, size: int) -> None:
    """Says which rank the calling thread is; `tensorrt_llm._utils.mpi_rank()` answers it."""
    _rank_of_thread.rank, _rank_of_thread.size = rank, size


def installed() -> Installation | None:
    """The installation in force, or None."""
    return _installed[-1] if _installed else None


@contextmanager
def install(paths: Paths = "both", early: bool = False) -> Iterator[Installation]:
    """Installs the stand-in modules for the duration of the context.

    `early` gives the shape of releases 1.0 to 1.2, which have the old path only. Raises RuntimeError when the real
    tensorrt_llm is importable, and ValueError for `early` with another path than "old". Nested installs replace one
    another; leaving restores what was there.
    """
    modules = _modules(paths, early)
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "tensorrt_llm"}
    if not _installed and (hidden or importlib.util.find_spec("tensorrt_llm") is not None):
        raise RuntimeError("tensorrt_llm is installed here, and the simulated runtime does not hide it")
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(modules)
    _installed.append(Installation(paths, early))
    try:
        yield _installed[-1]
    finally:
        _installed.pop()
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def _modules(paths: Paths, early: bool) -> dict[str, ModuleType]:
    if early and paths != "old":
        raise ValueError('the early interface exists under paths="old" only')
    contents: dict[str, dict[str, Any]] = {
        "tensorrt_llm._utils": _mpi_functions(),
        "tensorrt_llm.logger": {"logger": logging.getLogger("tensorrt_llm")},
        "tensorrt_llm.llmapi.llm_args": {"TorchLlmArgs": SimpleNamespace},
        "tensorrt_llm.bindings.internal.batch_manager": {"LlmRequest": object},
        _PYEXECUTOR: {},
    }
    connector = _connector_contents(early)
    if paths != "new":
        contents[OLD_CONNECTOR_MODULE] = connector
    if paths != "old":
        contents[NEW_CONNECTOR_MODULE] = connector
        contents[NEW_LAYOUT_MODULE] = _layout_contents()
        contents["tensorrt_llm.runtime.kv_cache_manager_v2"] = {"BAD_PAGE_INDEX": layout.BAD_PAGE_INDEX}
    return _build(contents)


def _mpi_functions() -> dict[str, Any]:
    return {
        "mpi_rank": lambda: _rank_of_thread.rank,
        "mpi_world_size": lambda: _rank_of_thread.size,
        "local_mpi_rank": lambda: _rank_of_thread.rank,
        "local_mpi_size": lambda: _rank_of_thread.size,
    }


def _connector_contents(early: bool) -> dict[str, Any]:
    prefix = "Early" if early else ""
    names = ("KvCacheConnectorScheduler", "KvCacheConnectorWorker", "RequestData")
    contents = {name: getattr(interface, prefix + name) for name in names}
    return contents | {"SchedulerOutput": interface.SchedulerOutput}


def _layout_contents() -> dict[str, Any]:
    names = ("KvCacheBufferRef", "KvCacheLayerGroupLayout", "KvCacheLayout", "KvCacheRegion", "valid_page_slots")
    return {name: getattr(layout, name) for name in (*names, "BAD_PAGE_INDEX")}


def _build(contents: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Modules with their parent packages, each bound as an attribute of its parent."""
    modules: dict[str, ModuleType] = {}
    for full_name, values in contents.items():
        parts = full_name.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in modules:
                modules[name] = ModuleType(name)
                modules[name].__path__ = []
                if depth > 1:
                    setattr(modules[".".join(parts[: depth - 1])], parts[depth - 1], modules[name])
        modules[full_name].__dict__.update(values)
    # `from tensorrt_llm import logger` gives the logger, not the module, as in the original.
    vars(modules["tensorrt_llm"])["logger"] = contents["tensorrt_llm.logger"]["logger"]
    return modules
