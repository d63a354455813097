"""The connector interface of TensorRT-LLM, as its public documentation states it, for tests and the demo only.

Two shapes exist. `KvCacheConnectorScheduler`, `KvCacheConnectorWorker` and `RequestData` are the later one, with
per-layer-group callbacks. `Early…` are those of releases 1.0 to 1.2: flat callbacks only, and no block hashes,
priorities, salt or layer groups in `RequestData`. `install` decides which one a connector imports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from s3kv.sim.layout import KvCacheLayout

BlockIds = list[int]
"""Page slots of one index space by block ordinal; -1 where a block has no page."""


@dataclass
class EarlyRequestData:
    """What the scheduler reports of one request in one iteration (releases 1.0 to 1.2)."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class RequestData(EarlyRequestData):
    """What the scheduler reports of one request in one iteration.

    `new_tokens` and the block ids are deltas since the last report. `block_hashes` may be empty, `priorities` None.
    """

    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """The requests of one iteration: those reported for the first time, and those reported before."""

    new_requests: list[Any] = field(default_factory=list)
    cached_requests: list[Any] = field(default_factory=list)


class EarlyKvCacheConnectorWorker(ABC):
    """The rank's side of a connector (releases 1.0 to 1.2)."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None
        super().__init__()

    def bind_connector_meta(self, metadata: object) -> None:
        """Takes this iteration's metadata; it may be None."""
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        """The metadata bound last."""
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        """A callable to run at the end of every forward pass on its stream, or None."""
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Takes the pool, `[num_blocks, num_layers, kv_factor, block_size]`."""

    @abstractmethod
    def start_load_kv(self, stream: torch.cuda.Stream) -> None:
        """Begins the loads named in the metadata; `stream` runs the forward pass."""

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: torch.cuda.Stream) -> None:
        """Called just before a layer is enqueued."""

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: torch.cuda.Stream) -> None:
        """Called just after a layer is enqueued."""

    @abstractmethod
    def wait_for_save(self, stream: torch.cuda.Stream) -> None:
        """Called when the forward pass is enqueued, not finished."""

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Request ids whose saves and whose loads are complete; only ids that were given, each once."""


class EarlyKvCacheConnectorScheduler(ABC):
    """The leader's side of a connector (releases 1.0 to 1.2)."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        """Returns picklable metadata for the workers; None is allowed."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded beyond those on the device, and whether that happens in the background."""

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: BlockIds) -> bool:
        """True keeps the pages until every worker's `get_finished` names the request."""

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: BlockIds) -> None:
        """Tells the pages that a request was given."""


def _stand_in(flat: str, grouped: str) -> Callable[..., Any]:
    def unavailable(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} implements {grouped}, not {flat}, which this cache calls")

    unavailable.__name__ = flat
    return unavailable


def _let_grouped_form_suffice(cls: type, base: type, pairs: dict[str, str]) -> None:
    """Overriding the grouped form of a callback makes the abstract flat form unnecessary."""
    for flat, grouped in pairs.items():
        overridden = getattr(cls, grouped) is not getattr(base, grouped)
        if overridden and getattr(getattr(cls, flat), "__isabstractmethod__", False):
            setattr(cls, flat, _stand_in(flat, grouped))


class KvCacheConnectorWorker(EarlyKvCacheConnectorWorker):
    """The rank's side of a connector."""

    supports_attention_dp = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _let_grouped_form_suffice(cls, KvCacheConnectorWorker, {"register_kv_caches": "register_kv_cache_layout"})

    def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
        """Takes the layout. By default forwards the one pool tensor; raises NotImplementedError when there is none."""
        tensor = layout.as_single_pool_tensor()
        if tensor is None:
            regions = sum(len(group.regions) for group in layout.groups)
            raise NotImplementedError(
                f"{type(self).__name__} does not implement register_kv_cache_layout, and this cache has "
                f"{len(layout.groups)} layer group(s) with {regions} region(s), which no single tensor describes"
            )
        self.register_kv_caches(tensor)


class KvCacheConnectorScheduler(EarlyKvCacheConnectorScheduler):
    """The leader's side of a connector."""

    supports_attention_dp = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        pairs = {name: f"{name}_by_layer_group" for name in ("update_state_after_alloc", "request_finished")}
        _let_grouped_form_suffice(cls, KvCacheConnectorScheduler, pairs)

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[BlockIds]) -> None:
        """Grouped form; by default folds a single group to the flat form and raises NotImplementedError otherwise."""
        self.update_state_after_alloc(request, self._only_group(block_ids_by_layer_group, "update_state_after_alloc"))

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[BlockIds]) -> bool:
        """Grouped form; by default folds a single group to the flat form and raises NotImplementedError otherwise."""
        return self.request_finished(request, self._only_group(cache_block_ids_by_layer_group, "request_finished"))

    def wait_for_initialization(self) -> None:
        """Called once when every rank has registered its cache."""

    def _only_group(self, by_group: list[BlockIds], flat: str) -> BlockIds:
        if len(by_group) != 1:
            raise NotImplementedError(
                f"{type(self).__name__} does not implement {flat}_by_layer_group, and this cache has "
                f"{len(by_group)} layer groups"
            )
        return by_group[0]
