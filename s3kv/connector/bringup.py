"""What the LLM arguments must say before anything is connected: pure checks, each one sentence naming the setting.

Every name is looked up with a default, because the arguments' model differs between releases; a name that is not there
is a setting that the release does not have. Facts: the runtime contract, sections 1, 2 and 6; TensorRT-LLM's
"KV Cache Connector" page.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from s3kv.errors import ConfigError

logger = logging.getLogger("s3kv.connector")

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")
_WORLD_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "WORLD_SIZE")
_LOCAL_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Placement:
    """This process among its engine's ranks. Under attention DP every rank is an engine of its own: 0 of 1."""

    rank: int
    ranks: int
    attention_dp: bool
    process_rank: int
    """Rank in the job, whatever owns the cache; names this process's scheduler and worker."""

    @property
    def leads(self) -> bool:
        return self.rank == 0


def check_arguments(llm_args: Any) -> None:
    """Raises ConfigError for what a connector cannot serve; warns of what makes it useless."""
    cache = getattr(llm_args, "kv_cache_config", None)
    _refuse_parallelism(llm_args)
    _refuse_tiers(cache)
    if (beams := _number(llm_args, "max_beam_width", 1)) > 1:
        raise ConfigError(f"max_beam_width is {beams}, and s3kv serves one beam only: set it to 1")
    for name in ("speculative_config", "speculative_decoding_config"):
        if getattr(llm_args, name, None) is not None:
            raise ConfigError(f"{name} is set, and a rejected draft token takes pages away unreported: unset it")
    _refuse_policy(llm_args, cache)
    if block_reuse(llm_args) is False:
        logger.warning(
            "kv_cache_config.enable_block_reuse is False, so the runtime honours no loaded prefix: "
            "s3kv saves, and offers nothing"
        )


def _refuse_parallelism(llm_args: Any) -> None:
    for name, what in (("pipeline_parallel_size", "layers"), ("context_parallel_size", "tokens")):
        if (size := _number(llm_args, name, 1)) > 1:
            raise ConfigError(f"{name} is {size}, and s3kv does not serve caches whose {what} are split: set it to 1")


def _refuse_tiers(cache: Any) -> None:
    for name in ("host_cache_size", "disk_cache_size"):
        if (size := _number(cache, name, 0)) > 0:
            raise ConfigError(
                f"kv_cache_config.{name} is {size}, and a lower cache tier moves pages under a connector: set it to 0"
            )


def _refuse_policy(llm_args: Any, cache: Any) -> None:
    policy = getattr(getattr(llm_args, "scheduler_config", None), "capacity_scheduler_policy", None)
    name = str(getattr(policy, "value", policy) or "GUARANTEED_NO_EVICT").rsplit(".", 1)[-1].upper()
    # The V2 manager reports a replayed request as a new one, whatever the policy is called.
    if name != "GUARANTEED_NO_EVICT" and getattr(cache, "use_kv_cache_manager_v2", None) is not True:
        raise ConfigError(
            f"scheduler_config.capacity_scheduler_policy is {name}, and a request that is evicted and replayed "
            "comes back on other pages unreported: set it to GUARANTEED_NO_EVICT"
        )


def block_reuse(llm_args: Any) -> bool | None:
    """`kv_cache_config.enable_block_reuse`; None where it is not set."""
    value = getattr(getattr(llm_args, "kv_cache_config", None), "enable_block_reuse", None)
    return value if isinstance(value, bool) else None


def stated_tokens_per_block(llm_args: Any) -> int | None:
    """`kv_cache_config.tokens_per_block`, which the registered cache may contradict; None where it is not set."""
    value = _number(getattr(llm_args, "kv_cache_config", None), "tokens_per_block", 0)
    return value if value > 0 else None


def placement(llm_args: Any, environ: Mapping[str, str] = os.environ) -> Placement:
    """Rank and number of ranks, from MPI as the runtime sees it, else from the launcher's variables.

    Raises ConfigError when the ranks are spread over nodes: an offer needs every rank's slots, and one agent, which
    serves one node, has to know them all.
    """
    attention_dp = getattr(llm_args, "enable_attention_dp", False) is True
    world = max(_number(llm_args, "tensor_parallel_size", 1), 1)
    rank = _known("mpi_rank", environ, _RANK_VARIABLES, 0)
    running = _known("mpi_world_size", environ, _WORLD_VARIABLES, world)
    local = _known("local_mpi_size", environ, _LOCAL_VARIABLES, running)
    per_node = _number(llm_args, "gpus_per_node", world)
    if local < min(world, running) or 0 < per_node < world:
        raise ConfigError(
            f"tensor_parallel_size is {world} with {min(local, per_node)} ranks a node, and s3kv serves the ranks of "
            "one node only, since an offer needs all of an engine's slots at one agent: use one node"
        )
    if attention_dp:
        return Placement(0, 1, True, rank)
    return Placement(rank if world > 1 else 0, world, False, rank)


def _known(function: str, environ: Mapping[str, str], variables: tuple[str, ...], default: int) -> int:
    """What the runtime's own function says, else the first variable of a launcher that is set."""
    try:
        ask: Callable[[], int] = getattr(importlib.import_module("tensorrt_llm._utils"), function)
        return int(ask())
    except Exception:  # a release without the function, or with MPI switched off
        stated = (environ[name] for name in variables if environ.get(name, "").isdigit())
        return int(next(stated, default))


def _number(holder: Any, name: str, default: int) -> int:
    value = getattr(holder, name, None)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default
