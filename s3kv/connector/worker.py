"""The runtime's worker: every rank has one. A thin shell over `Transfers`.

`s3kv.connector.S3KVWorker` is this class with the runtime's own `KvCacheConnectorWorker` as its base.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from s3kv.client.engine import WorkerClient
from s3kv.client.launch import engine_id
from s3kv.connector.bringup import check_arguments, placement
from s3kv.connector.device import Device, Stream, device_for
from s3kv.connector.dropping import when_dropped
from s3kv.connector.guard import Troubles, never_raises, nothing
from s3kv.connector.layout import PagedCache, from_layout, from_tensor
from s3kv.connector.meeting import Room, join
from s3kv.connector.metadata import ConnectorMeta
from s3kv.connector.namespace import namespace_of
from s3kv.connector.ports import WorkerFactory
from s3kv.connector.transfers import Transfers, ring_blocks
from s3kv.settings import load_settings

_RETRY_S = 0.1


def _none_finished() -> tuple[list[int], list[int]]:
    return [], []


class WorkerShell:
    """Copies between this rank's pages and slots of host memory, as the leader's metadata says.

    Correctness rests on `start_load_kv` and `wait_for_save` alone: the per-layer hooks do nothing, because they are not
    called while a CUDA graph is replayed.
    """

    supports_attention_dp = True
    client_factory: WorkerFactory = WorkerClient
    device_factory: Callable[[torch.device], Device] = staticmethod(device_for)

    def __init__(self, llm_args: Any) -> None:
        """Raises ConfigError, one sentence naming the setting, before anything is connected."""
        super().__init__(llm_args)  # type: ignore[call-arg]  # the runtime's base comes next in line
        check_arguments(llm_args)
        self.troubles = Troubles()
        self._settings = load_settings()
        self._args = llm_args
        self._placement = placement(llm_args)
        self._transfers: Transfers | None = None
        self._room: Room | None = None
        self._call_off: Callable[[], object] = nothing
        if self._placement.leads:
            self._room = join(llm_args, self._placement.process_rank, "worker", self)

    # ---- bring-up ----

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """V1's pool, `[num_blocks, num_layers, kv_factor, block_size]`. Raises ConfigError for another shape."""
        self._start(from_tensor(kv_cache_tensor))

    def register_kv_cache_layout(self, layout: Any) -> None:
        """V2's layout. Raises ConfigError for what cannot be served."""
        self._start(from_layout(layout))

    def register_forward_pass_callable(self) -> None:
        """Nothing needs to be called at the end of a pass: `wait_for_save` comes then."""
        return

    def _start(self, cache: PagedCache) -> None:
        self.shutdown()
        namespace = namespace_of(self._args, self._settings.identity, cache, self._placement)
        if self._room is not None:
            self._room.publish(namespace, cache)  # the leader connects first: it may have to start the agent
        self._transfers = Transfers(
            self._settings,
            namespace,
            cache,
            self._placement,
            type(self).device_factory(cache.device),
            engine_id=rank_engine_id(self._room, self._placement.ranks),
            ring_blocks=ring_blocks(self._args, namespace.tokens_per_block),
            troubles=self.troubles,
            client_factory=type(self).client_factory,
        )
        self._call_off = when_dropped(self, _end, self._transfers, self._room)
        self._wait_for_agent(self._transfers)
        atexit.register(_close, weakref.ref(self))

    def _wait_for_agent(self, transfers: Transfers) -> None:
        """Another rank may just be starting the agent; without this one the engine would be offered nothing."""
        if transfers.attached or self._placement.leads or not self._settings.agent.autostart:
            return
        pause = threading.Event()
        for _ in range(int(self._settings.agent.start_timeout_s / _RETRY_S)):
            if transfers.client.connect():
                return
            pause.wait(_RETRY_S)

    # ---- every iteration ----

    @never_raises(nothing)
    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata  # where the runtime's base keeps it
        if self._transfers is not None:
            self._transfers.bind(metadata if isinstance(metadata, ConnectorMeta) else None)

    @never_raises(nothing)
    def start_load_kv(self, stream: Stream) -> None:
        """Raises PromiseBroken, and so stops the executor, when an offered prefix cannot be copied to its pages."""
        if self._transfers is not None:
            self._transfers.start_loads(stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Stream) -> None:
        """Nothing: the forward stream waits for all loads from `start_load_kv` on."""

    def save_kv_layer(self, layer_idx: int, stream: Stream) -> None:
        """Nothing: the snapshot is taken after the last layer."""

    @never_raises(nothing)
    def wait_for_save(self, stream: Stream) -> None:
        """Enqueue the snapshot of the blocks that this pass completes; waits for nothing."""
        if self._transfers is not None:
            self._transfers.snapshot(stream)

    @never_raises(_none_finished)
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        if self._transfers is None:
            return list(finished_gen_req_ids), []
        return self._transfers.finished(finished_gen_req_ids, started_loading_req_ids)

    # ---- the end ----

    @property
    def transfers(self) -> Transfers | None:
        """None before the cache is registered."""
        return self._transfers

    def shutdown(self) -> None:
        """Finish copies, unregister and unmap the arenas. Idempotent; newer runtimes call it. Also happens at exit, and
        in a thread of its own once a worker was dropped."""
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            self._call_off()
            _end(transfers, self._room)


def _end(transfers: Transfers, room: Room | None) -> None:
    if room is not None:
        room.retract()
    transfers.close()


def rank_engine_id(room: Room | None, ranks: int) -> str:
    """One id for all ranks of an engine. An engine of one rank has its own, whatever else the process holds."""
    return f"{engine_id()}/{room.key}" if room is not None and ranks == 1 else engine_id()


def _close(reference: weakref.ref[WorkerShell]) -> None:
    worker = reference()
    if worker is not None:
        worker.shutdown()
