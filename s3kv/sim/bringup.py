"""Starts one rank: builds the connector's halves, registers the cache, and refuses what the runtime refuses."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from s3kv.sim import interface
from s3kv.sim.comm import Communicator
from s3kv.sim.config import ConnectorConfig, SimConfig
from s3kv.sim.driver import ConnectorDriver, Driver, NoConnector
from s3kv.sim.errors import BringUpError
from s3kv.sim.executor import Executor
from s3kv.sim.install import installed, set_rank
from s3kv.sim.llm_args import make_llm_args
from s3kv.sim.managers import CacheManager, ManagerV1, ManagerV2
from s3kv.sim.model import Model

CONSTRUCTION_TIMEOUT_S = 120.0
_PAIRS = ("update_state_after_alloc", "request_finished")
_COMPUTE_DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class _Halves:
    worker: Any
    scheduler: Any | None


def start_rank(
    config: SimConfig, connector: ConnectorConfig | None, comm: Communicator, clock: Callable[[], float]
) -> Executor:
    """Builds one rank's executor. Raises BringUpError for what the runtime refuses; a connector's own errors pass."""
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", comm.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads)
    set_rank(comm.rank, comm.size)
    manager = make_manager(config, device)
    sharded = comm.size > 1 and not config.attention_dp
    model = Model(
        config.model,
        manager.views(),
        tokens_per_block=config.tokens_per_block,
        seed=config.seed,
        rank=comm.rank if sharded else 0,
        tp_size=comm.size if sharded else 1,
        all_reduce=comm.all_reduce if sharded else lambda tensor: tensor,
        device=device,
        dtype=_COMPUTE_DTYPES[config.compute_dtype],
    )
    driver: Driver = NoConnector() if connector is None else _attach(config, connector, comm, manager)
    return Executor(config, model, manager, driver, clock)


def make_manager(config: SimConfig, device: torch.device) -> CacheManager:
    """The cache manager that a configuration names. Raises ValueError for a cache that it cannot hold."""
    kind = ManagerV1 if config.manager == "v1" else ManagerV2
    return kind(config.cache_shape, reuse=config.reuse, partial=config.partial_reuse, device=device)


def _attach(config: SimConfig, connector: ConnectorConfig, comm: Communicator, manager: CacheManager) -> Driver:
    interface_now = installed()
    if interface_now is None:
        raise BringUpError("no connector interface is installed: call s3kv.sim.install() first")
    if interface_now.early and config.manager == "v2":
        raise BringUpError('the early interface knows no layer groups: use manager="v1"')
    args = make_llm_args(config, connector, comm.rank)
    worker_class, scheduler_class = _classes(connector)
    if config.runtime_checks:
        _check_arguments(args, config)
        _check_classes(worker_class, scheduler_class, config, len(manager.groups))
        _warn_of_window(scheduler_class, manager)
    halves = _build(worker_class, scheduler_class, args, config, comm)
    _register(halves.worker, manager)
    comm.allgather(None)
    wait = getattr(halves.scheduler, "wait_for_initialization", None)
    if wait is not None:
        wait()
    return ConnectorDriver(
        halves.worker,
        halves.scheduler,
        comm,
        attention_dp=config.attention_dp,
        grouped=isinstance(manager, ManagerV2),
        early=interface_now.early,
        trace=config.trace,
    )


def _classes(connector: ConnectorConfig) -> tuple[Any, Any]:
    module = importlib.import_module(connector.connector_module)
    return getattr(module, connector.connector_worker_class), getattr(module, connector.connector_scheduler_class)


def _build(
    worker_class: Any, scheduler_class: Any, args: SimpleNamespace, config: SimConfig, comm: Communicator
) -> _Halves:
    """Builds the worker, and on the leader the scheduler, in two threads at once or in the order that is set."""
    leads = comm.rank == 0 or config.attention_dp
    if not leads:
        return _Halves(worker_class(args), None)

    def on_thread(kind: Any) -> Any:
        set_rank(comm.rank, comm.size)
        return kind(args)

    with ThreadPoolExecutor(1 if config.scheduler_first is not None else 2) as pool:
        order = [scheduler_class, worker_class] if config.scheduler_first else [worker_class, scheduler_class]
        futures = {kind: pool.submit(on_thread, kind) for kind in order}
        return _Halves(
            futures[worker_class].result(CONSTRUCTION_TIMEOUT_S),
            futures[scheduler_class].result(CONSTRUCTION_TIMEOUT_S),
        )


def _register(worker: Any, manager: CacheManager) -> None:
    if isinstance(manager, ManagerV2):
        worker.register_kv_cache_layout(manager.layout())
    elif isinstance(manager, ManagerV1):
        worker.register_kv_caches(manager.tensor())


def _check_arguments(args: SimpleNamespace, config: SimConfig) -> None:
    cache, policy = args.kv_cache_config, args.scheduler_config.capacity_scheduler_policy
    refusals = {
        "kv_cache_config.host_cache_size and kv_cache_config.disk_cache_size must be 0 or unset": (
            (cache.host_cache_size or 0) > 0 or (cache.disk_cache_size or 0) > 0
        ),
        "speculative_config is not supported": args.speculative_config is not None,
        f"capacity_scheduler_policy {policy} is not supported, only GUARANTEED_NO_EVICT": (
            config.manager == "v1" and policy != "GUARANTEED_NO_EVICT"
        ),
        f"max_beam_width {args.max_beam_width} is not supported, only 1": args.max_beam_width > 1,
    }
    for message, refused in refusals.items():
        if refused:
            raise BringUpError(f"with a KV cache connector, {message}")


def _check_classes(worker_class: Any, scheduler_class: Any, config: SimConfig, groups: int) -> None:
    if config.attention_dp:
        for kind in (worker_class, scheduler_class):
            if getattr(kind, "supports_attention_dp", False) is not True:
                raise BringUpError(f"{kind.__name__} does not declare supports_attention_dp = True")
    grouped = [name for name in _PAIRS if _overrides(scheduler_class, f"{name}_by_layer_group")]
    flat = [name for name in _PAIRS if _overrides(scheduler_class, name)]
    complete = len(grouped) == 2 or (len(flat) == 2 and groups == 1)
    if not complete:
        suffix = "_by_layer_group" if grouped or groups > 1 else ""
        missing = [f"{name}{suffix}" for name in _PAIRS if name not in (grouped if suffix else flat)]
        raise BringUpError(
            f"{scheduler_class.__name__} lacks {' and '.join(missing)}, which a cache of {groups} layer group(s) calls"
        )


def _warn_of_window(scheduler_class: Any, manager: CacheManager) -> None:
    windows = [pool.window for pool in manager.pools]
    if windows[0] is not None and not _overrides(scheduler_class, f"{_PAIRS[0]}_by_layer_group"):
        logging.getLogger(__name__).warning(
            "%s has the flat callbacks alone, and this cache has a window of %d tokens: it reports passed blocks as -1",
            scheduler_class.__name__,
            windows[0],
        )


def _overrides(kind: Any, name: str) -> bool:
    """Whether a class has its own method; a stand-in for a flat form is not one."""
    method = getattr(kind, name, None)
    bases = (interface.KvCacheConnectorScheduler, interface.EarlyKvCacheConnectorScheduler)
    inherited = any(method is getattr(base, name, None) for base in bases)
    return method is not None and not inherited and method.__module__ != interface.__name__
