"""The runtime's scheduler: rank 0 has one, under attention DP every rank. A thin shell over `Planner`.

`s3kv.connector.S3KVScheduler` is this class with the runtime's own `KvCacheConnectorScheduler` as its base.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from s3kv.client.engine import LeaderClient
from s3kv.connector.bringup import block_reuse, check_arguments, placement
from s3kv.connector.dropping import when_dropped
from s3kv.connector.guard import Troubles, never_raises, nothing
from s3kv.connector.layout import PagedCache
from s3kv.connector.meeting import join
from s3kv.connector.metadata import ConnectorMeta
from s3kv.connector.modality import text_only
from s3kv.connector.namespace import model_folder
from s3kv.connector.planner import Planner
from s3kv.connector.ports import LeaderFactory
from s3kv.connector.worker import rank_engine_id
from s3kv.identity import NamespaceSpec
from s3kv.settings import load_settings

logger = logging.getLogger("s3kv.connector")


def _no_offer() -> tuple[int, bool]:
    return 0, False


def _no_meta() -> ConnectorMeta | None:
    return None


class SchedulerShell:
    """Decides what to load and save. Before the cache is registered it offers nothing."""

    supports_attention_dp = True
    client_factory: LeaderFactory = LeaderClient

    def __init__(self, llm_args: Any) -> None:
        """Raises ConfigError, one sentence naming the setting, before anything is connected."""
        super().__init__(llm_args)  # type: ignore[call-arg]  # the runtime's base comes next in line
        check_arguments(llm_args)
        self.troubles = Troubles()
        self._settings = load_settings()
        self._placement = placement(llm_args)
        self._offers = block_reuse(llm_args) is not False
        self._text_only = text_only(model_folder(llm_args))
        self._planner: Planner | None = None
        self._call_off: Callable[[], object] = nothing
        self._room = join(llm_args, self._placement.process_rank, "scheduler", self)
        self._room.when_published(self._start)

    def _start(self, namespace: NamespaceSpec, cache: PagedCache) -> None:
        """In the thread in which rank 0's worker registers the cache."""
        self.shutdown()
        leader = type(self).client_factory(
            self._settings,
            namespace,
            ranks=self._placement.ranks,
            engine_id=rank_engine_id(self._room, self._placement.ranks),
        )
        self._call_off = when_dropped(self, leader.close)
        leader.connect()
        self._planner = Planner(
            self._settings, namespace, cache, leader, offers=self._offers, text_only=self._text_only,
            troubles=self.troubles,
        )  # fmt: skip

    def wait_for_initialization(self) -> None:
        """The cache is registered on every rank by now; nothing is left to wait for."""
        if self._planner is None:
            logger.warning("no KV cache was registered with this engine's worker: s3kv neither saves nor offers")

    @never_raises(_no_offer)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Waits at most the budget of the settings; V1 holds a lock of its own meanwhile."""
        if self._planner is None:
            return _no_offer()
        return self._planner.match(request, num_computed_tokens)

    @never_raises(nothing)
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        if self._planner is not None:
            self._planner.allocated(request, [list(block_ids)])

    @never_raises(nothing)
    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: Any) -> None:
        if self._planner is not None:
            self._planner.allocated(request, _by_group(block_ids_by_layer_group))

    @never_raises(nothing)
    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Tokens `[start, end)` of an offer will not be used: its head or its tail."""
        if self._planner is not None:
            self._planner.cancel(request, start, end)

    @never_raises(_no_meta)
    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMeta | None:
        """Raises PromiseBroken, and so stops the executor, when a load that was offered cannot be planned."""
        return self._planner.plan(scheduler_output) if self._planner is not None else None

    @never_raises(bool)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """False: saves were snapshots. True only while a background load may still write the request's pages."""
        return self._planner.finish(request) if self._planner is not None else False

    @never_raises(bool)
    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: Any) -> bool:
        """As `request_finished`."""
        return self._planner.finish(request) if self._planner is not None else False

    @property
    def planner(self) -> Planner | None:
        """None before the cache is registered."""
        return self._planner

    def shutdown(self) -> None:
        """Idempotent; also happens once a scheduler was dropped."""
        planner, self._planner = self._planner, None
        if planner is not None:
            self._call_off()
            planner.leader.close()


def _by_group(pages: Any) -> list[list[int]]:
    """Lists by layer group; some builds give a dict by group id."""
    groups = [pages[group] for group in sorted(pages)] if isinstance(pages, dict) else pages
    return [list(group) for group in groups]
