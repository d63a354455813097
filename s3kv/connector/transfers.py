"""One rank's transfers: what the worker does with the leader's metadata, apart from the runtime's interface."""

from __future__ import annotations

from typing import Any

from s3kv.client.engine import WorkerClient
from s3kv.connector.arenas import Arenas
from s3kv.connector.bringup import Placement
from s3kv.connector.device import Device, Stream
from s3kv.connector.guard import Troubles
from s3kv.connector.layout import PagedCache, places
from s3kv.connector.loader import Loader
from s3kv.connector.metadata import ConnectorMeta, Load, Save
from s3kv.connector.ports import Worker, WorkerFactory
from s3kv.connector.ring import RowLayout, SnapshotRing, ring_rows
from s3kv.connector.saver import Saver
from s3kv.identity import NamespaceSpec
from s3kv.settings import Settings

CLOSE_S = 5.0


class Transfers:
    """Loads and saves of one rank. Every method but `close` is for the executor's thread and never waits."""

    def __init__(
        self,
        settings: Settings,
        namespace: NamespaceSpec,
        cache: PagedCache,
        placement: Placement,
        device: Device,
        *,
        engine_id: str,
        ring_blocks: int,
        troubles: Troubles,
        client_factory: WorkerFactory = WorkerClient,
    ) -> None:
        """Raises ConfigError when tier.pin is require and an arena cannot be registered; nothing is left then."""
        self._device = device
        pin = settings.tier.pin if device.pins else "never"
        self._arenas = Arenas(device, pin)
        self._troubles = troubles
        self.client: Worker = client_factory(
            settings,
            namespace,
            rank=placement.rank,
            ranks=placement.ranks,
            engine_id=engine_id,
            pinned=pin != "never",
            on_arena=self._arenas.add,
            on_arena_gone=self._arenas.remove,
        )
        self.attached = self.client.connect()
        if self._arenas.refusal is not None:
            self.client.close()
            raise self._arenas.refusal
        self.loader = Loader(
            self.client, device, self._arenas, places(cache, namespace, self.client.read_parts), troubles,
            reconnect_s=settings.agent.reconnect_s,
        )  # fmt: skip
        self.saver = self._make_saver(settings, namespace, cache, ring_blocks)
        self._loads: list[Load] = []
        self._saves: tuple[Save, ...] = ()
        self._forward_stream: Stream | None = None

    def _make_saver(
        self, settings: Settings, namespace: NamespaceSpec, cache: PagedCache, ring_blocks: int
    ) -> Saver | None:
        layout = RowLayout(cache, namespace, self.client.write_parts)
        if not settings.save.enabled or not layout.parts:
            return None
        ring = SnapshotRing(
            self._device, layout, ring_rows(layout.row_bytes, settings.save.ring_max_bytes, ring_blocks)
        )
        return Saver(self.client, self._device, self._arenas, ring, self._troubles)

    def bind(self, meta: ConnectorMeta | None) -> None:
        """Take over what the leader said of this iteration.

        Loads that were bound and not begun are kept: the runtime counts on them when the request's pass runs, be it an
        iteration later. Saves that were not begun are dropped: the pass that would have computed them did not run.
        """
        self._saves = ()
        if meta is None:
            return
        if meta.dropped:
            self._drop(meta.dropped)
        self._loads.extend(meta.loads)
        self._saves = meta.saves
        if meta.parked:
            streams = [self._device.current_stream()]
            if self._forward_stream is not None:
                streams.append(self._forward_stream)
            self.loader.park(meta.parked, streams)

    def _drop(self, request_ids: tuple[int, ...]) -> None:
        for load in self._loads:
            if load.request_id in request_ids:
                self.client.release(load.lease, load.epoch)
        self._loads = [load for load in self._loads if load.request_id not in request_ids]
        self.loader.drop(request_ids)

    def start_loads(self, stream: Stream) -> None:
        """Raises PromiseBroken when what was offered cannot be copied."""
        self._forward_stream = stream
        if self._loads:
            loads, self._loads = self._loads, []
            self.loader.start(loads, stream)

    def snapshot(self, stream: Stream) -> None:
        self._forward_stream = stream
        if not self._saves:
            return
        saves, self._saves = self._saves, ()
        if self.saver is None:
            return
        if self.client.epoch == 0:
            self._troubles.count("save_without_agent", sum(len(save.hashes) for save in saves))
            return
        self.saver.snapshot(saves, stream)

    def finished(self, ended: list[int], started: list[int]) -> tuple[list[int], list[int]]:
        return self.loader.finished(ended, started)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything begun is copied and committed, and every lease given back. For shutdown and tests."""
        saved = self.saver is None or self.saver.drain(timeout_s)
        return self.loader.drain(timeout_s) and saved

    def close(self) -> None:
        """Finish what is under way, unregister and unmap the arenas. Idempotent; safe at exit."""
        if self.saver is not None:
            self.saver.close(CLOSE_S)
        self.loader.close(CLOSE_S)
        self.client.close()


def ring_blocks(llm_args: Any, tokens_per_block: int) -> int:
    """Blocks that the ring holds: what one pass can complete, as far as the arguments tell, or two with overlap.

    The overlap scheduler enqueues a pass while the one before still runs, so both passes' blocks are in the ring.
    """
    passes = 1 if getattr(llm_args, "disable_overlap_scheduler", False) is True else 2
    return passes * _blocks_a_pass(llm_args, tokens_per_block)


def _blocks_a_pass(llm_args: Any, tokens_per_block: int) -> int:
    tokens = getattr(llm_args, "max_num_tokens", None)
    requests = getattr(llm_args, "max_batch_size", None)
    tokens = tokens if isinstance(tokens, int) and tokens > 0 else 8192
    requests = requests if isinstance(requests, int) and requests > 0 else 64
    # Each request of a pass may complete one block that was begun before.
    return -(-tokens // tokens_per_block) + min(requests, 256)
