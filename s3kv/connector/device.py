"""The few things that are done on a device: streams, events, gathers and copies. One class a kind of device.

`HostDevice` does everything at once, in the calling thread: on the CPU a pass is over when it was enqueued.
`CudaDevice` enqueues, and never waits in the calling thread; who must wait calls `Event.synchronize` from a helper
thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, repeat
from typing import Any, Protocol

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
        copy_on_host(copies)

    def pin(self, address: int, nbytes: int) -> str | None:
        return None

    def unpin(self, address: int) -> None:
        return


_Move = tuple[int, int, int]
"""Target, source and size."""

_PARALLEL_BYTES = 4 << 20  # some 0.8 ms, ten times what handing it to threads takes
_THREADS = min(4, os.cpu_count() or 1)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "s3kv-copy")


def copy_on_host(copies: Sequence[Copies]) -> None:
    """Row by row. Raises IndexError, with nothing copied, for a row out of bounds."""
    moves: list[_Move] = []
    for each in copies:
        targets, sources = each.target.addresses(each.target_rows), each.source.addresses(each.source_rows)
        moves += zip(targets.tolist(), sources.tolist(), repeat(each.source.size))
    _move(moves)


def gather_on_host(gathers: Sequence[Gather]) -> None:
    """Row by row: torch's own gather into rows at a stride takes longer than the bytes."""
    check_gathers(gathers)
    moves: list[_Move] = []
    for each in gathers:
        for lane in each.lanes:
            source, target = lane.source, lane.target
            targets = count(target.base + target.stride * each.start, target.stride)
            sources = [source.base + source.stride * row for row in each.rows]
            moves += zip(targets, sources, repeat(source.size))
    _move(moves)


def _move(moves: list[_Move]) -> None:
    """memmove, which releases the interpreter lock. In several threads when it is much, since one does not use up the
    memory's bandwidth: it reaches half of one large memcpy, which writes past the caches, and two reach 0.9 of it
    (`python -m benchmarks host`)."""
    if sum([size for _, _, size in moves]) < _PARALLEL_BYTES:
        _move_here(moves)
        return
    parts = [moves[start::_THREADS] for start in range(_THREADS)]
    list(_threads().map(_move_here, parts))


def _move_here(moves: list[_Move]) -> None:
    memmove = ctypes.memmove
    for target, source, size in moves:
        memmove(target, source, size)


def check_gathers(gathers: Sequence[Gather]) -> None:
    for each in gathers:
        each.check()


def device_for(device: torch.device) -> Device:
    """The device that holds the pages."""
    if device.type == "cuda":
        from s3kv.connector.cuda import CudaDevice

        return CudaDevice(device)
    return HostDevice()
