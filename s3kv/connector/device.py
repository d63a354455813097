"""The few things that are done on a device: streams, events, gathers and copies. One class a kind of device.

`HostDevice` does everything at once, in the calling thread: on the CPU a pass is over when it was enqueued.
`CudaDevice` enqueues, and never waits in the calling thread; who must wait calls `Event.synchronize` from a helper
thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from s3kv.connector.strips import Copies, Gather

Stream = Any
"""`torch.cuda.Stream`, or a stand-in that the device made."""
Scratch = Any
"""What `Device.scratch` made."""


class Event(Protocol):
    def synchronize(self) -> None:
        """Wait, in the calling thread, for what was enqueued before the event."""


class Device(Protocol):
    """Pages, ring and side streams live on it. Every call but `adopt` and `pin` may come from any adopted thread."""

    @property
    def pins(self) -> bool:
        """Whether registering host memory makes transfers faster."""

    def adopt(self) -> None:
        """Make it the calling thread's device: torch's current device is per thread."""

    def new_stream(self) -> Stream: ...

    def current_stream(self) -> Stream: ...

    def record(self, stream: Stream) -> Event:
        """An event at the stream's present end."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What is enqueued on `stream` from now on runs after `event`. Waits on the device, not here."""

    def zeros(self, rows: int, size: int) -> torch.Tensor:
        """uint8 `[rows, size]`."""

    def scratch(self, count: int) -> Scratch:
        """Room for `count` row numbers on their way to the device."""

    def gather(self, gathers: Sequence[Gather], stream: Stream, scratch: Scratch, at: int) -> None:
        """Within the device, in stream order. Raises IndexError, with nothing enqueued, for a row out of bounds.

        The numbers lie in `scratch` from `at` on, one after another, and must stay there until the gather has run.
        """

    def copy(self, copies: Sequence[Copies], stream: Stream) -> None:
        """Between host and device, in stream order. Raises IndexError, with nothing copied, for a row out of bounds."""

    def pin(self, address: int, nbytes: int) -> str | None:
        """Register host memory for transfers; why it could not be, or None."""

    def unpin(self, address: int) -> None: ...


class _Done:
    """An event of a device on which everything is done when it is enqueued."""

    def synchronize(self) -> None:
        return


_DONE = _Done()


class HostDevice:
    """The CPU."""

    pins = False

    def adopt(self) -> None:
        return

    def new_stream(self) -> Stream:
        return None

    def current_stream(self) -> Stream:
        return None

    def record(self, stream: Stream) -> Event:
        return _DONE

    def wait(self, stream: Stream, event: Event) -> None:
        event.synchronize()

    def zeros(self, rows: int, size: int) -> torch.Tensor:
        return torch.zeros((rows, size), dtype=torch.uint8)

    def scratch(self, count: int) -> Scratch:
        return None

    def gather(self, gathers: Sequence[Gather], stream: Stream, scratch: Scratch, at: int) -> None:
        gather_on_host(gathers)

    def copy(self, copies: Sequence[Copies], stream: Stream) -> None:
        """In several threads when it is much, since one does not use up the memory's bandwidth: it reaches half of one
        large memcpy, which writes past the caches, and two reach 0.93 of it (`python -m benchmarks host`)."""
        if sum(each.source.size * len(each.source_rows) for each in copies) < _PARALLEL_BYTES:
            copy_on_host(copies)
            return
        check_copies(copies)
        parts = [part for each in copies for part in _split(each, _COPY_THREADS)]
        list(_copy_threads().map(lambda part: copy_on_host([part]), parts))

    def pin(self, address: int, nbytes: int) -> str | None:
        return None

    def unpin(self, address: int) -> None:
        return


_PARALLEL_BYTES = 16 << 20
_COPY_THREADS = min(4, os.cpu_count() or 1)


@functools.cache
def _copy_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COPY_THREADS, "s3kv-copy")


def check_copies(copies: Sequence[Copies]) -> None:
    """Raises IndexError when a row is outside its strip."""
    for each in copies:
        each.target.check(each.target_rows)
        each.source.check(each.source_rows)


def _split(copies: Copies, count: int) -> Iterator[Copies]:
    rows = zip(np.array_split(copies.target_rows, count), np.array_split(copies.source_rows, count), strict=True)
    return (Copies(copies.target, target, copies.source, source) for target, source in rows)


def copy_on_host(copies: Sequence[Copies]) -> None:
    """memmove row by row, which releases the interpreter lock."""
    planned = [
        (each.target.addresses(each.target_rows), each.source.addresses(each.source_rows), each.source.size)
        for each in copies
    ]
    for targets, sources, size in planned:
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, size)


def check_gathers(gathers: Sequence[Gather]) -> None:
    for each in gathers:
        each.check()


def gather_on_host(gathers: Sequence[Gather]) -> None:
    """memmove row by row: torch's own gather into rows at a stride takes longer than the bytes."""
    check_gathers(gathers)
    for each in gathers:
        for source, target in ((lane.source, lane.target) for lane in each.lanes):
            for place, row in enumerate(each.rows, each.start):
                ctypes.memmove(target.base + target.stride * place, source.base + source.stride * row, source.size)


def device_for(device: torch.device) -> Device:
    """The device that holds the pages."""
    if device.type == "cuda":
        from s3kv.connector.cuda import CudaDevice

        return CudaDevice(device)
    return HostDevice()
