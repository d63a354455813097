"""Loads: slots to pages, before a pass or in the background.

Before a pass: the copies go to a side stream that waits for the forward stream's present end (a pass before may still
write these pages), and the forward stream waits for them, on the device. The lease is given back by the helper thread
once the copies have run.

In the background (policy park): the helper thread asks until every promised block is there, copies, waits for the copy,
and only then is the request named by `finished`. A load whose fetch failed is never named: the runtime would read pages
that nobody wrote. It ends with its request.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from s3kv.client.reconnecting import MAX_PAUSE_FACTOR
from s3kv.connector.arenas import Arenas
from s3kv.connector.device import Device, Event, Stream
from s3kv.connector.guard import PromiseBroken, Troubles
from s3kv.connector.layout import Place
from s3kv.connector.metadata import Load
from s3kv.connector.ports import Worker
from s3kv.connector.strips import Copies, Numbers, numbers

POLL_S = 0.005
"""How often the agent is asked whether a parked load's blocks have come."""

POLL_IDLE_FACTOR = 4
"""Asking for many takes time that the engine's other threads want too: afterwards pause this much longer."""


class _NoJob:
    """Nothing came in time."""


_NO_JOB = _NoJob()
_Job = tuple[Load, Event] | threading.Event | _NoJob


@dataclass(slots=True)
class _Parked:
    """`after`: positions of the forward stream when the pages were handed out. `ended`: its request did, meanwhile."""

    load: Load
    after: list[Event]
    state: Literal["waiting", "copying", "failed"] = "waiting"
    ended: bool = False


class Loader:
    """`start`, `park`, `drop` and `finished` are for the executor's thread."""

    def __init__(
        self,
        client: Worker,
        device: Device,
        arenas: Arenas,
        places: Sequence[Place],
        troubles: Troubles,
        *,
        reconnect_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._device = device
        self._arenas = arenas
        self._places = places
        self._troubles = troubles
        self._reconnect_s = self._pause_s = reconnect_s
        self._clock = clock
        self._side = device.new_stream()
        self._lock = threading.Lock()  # guards the four below
        self._parked: dict[int, _Parked] = {}
        self._given: set[int] = set()
        self._loaded: set[int] = set()
        self._ending: set[int] = set()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._newest_epoch = 0
        self._thread = threading.Thread(target=self._run, name="s3kv-loader", daemon=True)
        self._thread.start()

    # ---- the executor's thread ----

    def start(self, loads: Sequence[Load], stream: Stream) -> None:
        """Enqueue loads that the next pass needs. Raises PromiseBroken when their bytes cannot be copied."""
        try:
            self._device.wait(self._side, self._device.record(stream))
            copies = [copy for load in loads for copy in self._copies(load, load.slots)]
            self._device.copy(copies, self._side)
            copied = self._device.record(self._side)
            self._device.wait(stream, copied)
        except Exception as error:
            raise PromiseBroken(f"a prefix that was offered cannot be copied to its pages: {error}") from error
        self._troubles.count("blocks_loaded", sum(load.blocks for load in loads))
        for load in loads:
            self._jobs.put((load, copied))

    def park(self, loads: Sequence[Load], streams: Sequence[Stream]) -> None:
        """Load in the background, after what `streams` hold now."""
        after = [self._device.record(stream) for stream in streams]
        with self._lock:
            for load in loads:
                self._loaded.discard(load.request_id)
                self._parked[load.request_id] = _Parked(load, after)
        self._jobs.put(threading.Event())  # wakes the thread

    def drop(self, request_ids: Sequence[int]) -> None:
        """These requests have ended: begin no background load of theirs, and name it no more."""
        with self._lock:
            for request_id in request_ids:
                self._abandon(request_id)
                if request_id not in self._given:
                    self._loaded.discard(request_id)

    @property
    def idle(self) -> bool:
        return not (self._parked or self._given or self._ending)

    def finished(self, ended: Sequence[int], started: Sequence[int]) -> tuple[list[int], list[int]]:
        """`get_finished`: ids that were given, each once. Held requests are named as soon as nothing writes to them."""
        if not ended and not started and self.idle:
            return [], []
        with self._lock:
            self._given.update(started)
            saved = [request_id for request_id in ended if self._abandon(request_id)]
            self._ending.update(request_id for request_id in ended if request_id not in saved)
            over = [request_id for request_id in self._ending if request_id not in self._parked]
            self._ending.difference_update(over)
            loaded = [request_id for request_id in self._loaded if request_id in self._given]
            self._loaded.difference_update(loaded)
            self._given.difference_update(loaded)
        return saved + over, loaded

    def _abandon(self, request_id: int) -> bool:
        """With the lock held. False while a copy to the request's pages is under way."""
        parked = self._parked.get(request_id)
        if parked is not None and parked.state == "copying":
            parked.ended = True
            return False
        if parked is not None:
            del self._parked[request_id]
            if parked.state == "waiting":
                self._client.release(parked.load.lease, parked.load.epoch)
        if request_id not in self._loaded:
            self._given.discard(request_id)
        return True

    # ---- the helper thread ----

    def drain(self, timeout_s: float) -> bool:
        """Wait until the loads started before have run and their leases are given back. For shutdown and tests."""
        reached = threading.Event()
        self._jobs.put(reached)
        return reached.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._device.adopt()
        stream = self._device.new_stream()
        poll_s, next_attach = POLL_S, self._clock() + self._pause_s
        while True:
            try:
                waiting = self._waiting()
                job = self._next(poll_s if waiting else self._pause_s)
                if job is None:
                    return
                if isinstance(job, threading.Event):
                    job.set()
                elif isinstance(job, tuple):
                    self._give_back(*job)
                if self._clock() >= next_attach:
                    self._reattach()
                    next_attach = self._clock() + self._pause_s
                started = self._clock()
                for parked in self._waiting():
                    self._advance(parked, stream)
                poll_s = max(POLL_S, POLL_IDLE_FACTOR * (self._clock() - started))
            except Exception as error:
                self._troubles.log("load_thread", error)

    def _next(self, timeout_s: float) -> _Job | None:
        try:
            return self._jobs.get(timeout=timeout_s)
        except queue.Empty:
            return _NO_JOB

    def _waiting(self) -> list[_Parked]:
        if not self._parked:
            return []
        with self._lock:
            return [parked for parked in self._parked.values() if parked.state == "waiting"]

    def _reattach(self) -> None:
        """A rank that is not attached keeps the whole engine from being offered anything."""
        if self._client.attached() or self._client.connect():
            self._pause_s = self._reconnect_s
        else:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_FACTOR * self._reconnect_s)

    def _give_back(self, load: Load, copied: Event) -> None:
        copied.synchronize()
        self._client.release(load.lease, load.epoch)
        if load.epoch != self._newest_epoch:
            # Offers come in the order of the agents that made them, so nothing of an older one is still to be copied.
            self._newest_epoch = load.epoch
            self._client.forget_epochs_before(load.epoch)

    def _advance(self, parked: _Parked, stream: Stream) -> None:
        load = parked.load
        state = self._client.promised(load.lease, load.epoch)
        if state.failed:
            self._fail(parked, "its blocks could not be fetched")
        elif state.ready and self._begin(parked):
            try:
                for event in parked.after:
                    self._device.wait(stream, event)
                self._device.copy(self._copies(load, state.slots[load.skip : load.skip + load.blocks]), stream)
                self._device.record(stream).synchronize()
            except Exception as error:
                try:
                    self._device.record(stream).synchronize()  # some of the copies may have begun
                finally:
                    self._fail(parked, str(error))
                return
            self._client.release(load.lease, load.epoch)
            self._end(parked)

    def _begin(self, parked: _Parked) -> bool:
        with self._lock:
            if self._parked.get(parked.load.request_id) is not parked:
                return False
            parked.state = "copying"
            return True

    def _end(self, parked: _Parked) -> None:
        self._troubles.count("blocks_loaded", parked.load.blocks)
        with self._lock:
            if self._parked.get(parked.load.request_id) is parked:
                del self._parked[parked.load.request_id]
                self._loaded.add(parked.load.request_id)

    def _fail(self, parked: _Parked, reason: str) -> None:
        with self._lock:
            if self._parked.get(parked.load.request_id) is not parked:
                return  # it ended meanwhile, and its lease was given back then
            parked.state = "failed"
            if parked.ended:
                del self._parked[parked.load.request_id]
                self._given.discard(parked.load.request_id)
        self._client.release(parked.load.lease, parked.load.epoch)
        self._troubles.log(
            "parked_load", LookupError(f"request {parked.load.request_id} is held until it is cancelled: {reason}")
        )

    def _copies(self, load: Load, named: Sequence[int]) -> list[Copies]:
        """Raises LookupError when a part's arena is not mapped or slots are missing."""
        if len(named) != load.blocks:
            raise LookupError(f"{len(named)} slots were named for {load.blocks} blocks")
        slots = numbers(named)
        chosen: list[tuple[Numbers, Numbers]] = []
        for group in load.pages:
            pages = numbers(group)
            present = pages != -1
            chosen.append((pages[present], slots[present]))
        copies = []
        for place in self._places:
            arena = self._client.arena(load.epoch, place.part)
            if arena is None:
                raise LookupError(f"the arena of part {place.part} of agent run {load.epoch:#x} is not mapped")
            pages, held = chosen[place.group]
            source = self._arenas.strip(arena).narrow(place.offset, place.region.size)
            copies.append(Copies(place.region.strip, pages, source, held))
        return copies
