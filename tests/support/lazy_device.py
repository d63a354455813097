"""A device whose streams run late, in any order that waits allow: what CUDA may do, on the CPU.

Nothing that is enqueued runs until somebody synchronizes, or waits for it from a stream that runs. With `eager` a
stream runs at once what nothing keeps it from running, so that a missing wait shows as too early, not only as too late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from s3kv.connector.device import check_gathers, copy_on_host, gather_on_host
from s3kv.connector.strips import Copies, Gather


@dataclass(eq=False)
class LazyStream:
    name: str
    eager: bool = False
    work: list[Callable[[], None]] = field(default_factory=list)
    done: int = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()


class LazyEvent:
    def __init__(self, device: LazyDevice, stream: LazyStream) -> None:
        self.device, self.stream, self.position = device, stream, len(stream.work)

    def synchronize(self) -> None:
        with self.device.lock:
            self.stream.run(self.position)

    @property
    def happened(self) -> bool:
        return self.stream.done >= self.position


class LazyDevice:
    """`eager_side`: streams that the connector makes run at once; the forward stream never does."""

    pins = True

    def __init__(self, *, eager_side: bool = False, pin_error: str | None = None) -> None:
        self.lock = threading.RLock()
        self.eager_side = eager_side
        self.forward = LazyStream("forward")
        self.sides: list[LazyStream] = []
        self.adopted: set[int] = set()
        self.pinned: dict[int, int] = {}
        self.pin_error = pin_error
        self.failing_copies = False
        """A copy that fails has begun: it is enqueued, and then raises."""

    def enqueue(self, stream: LazyStream, work: Callable[[], None]) -> None:
        with self.lock:
            stream.work.append(work)
            if stream.eager:
                stream.run(len(stream.work))

    def run_forward(self) -> None:
        with self.lock:
            self.forward.run(len(self.forward.work))

    @property
    def at_rest(self) -> bool:
        return all(each.done == len(each.work) for each in self.sides)

    # ---- Device ----

    def adopt(self) -> None:
        self.adopted.add(threading.get_ident())

    def new_stream(self) -> LazyStream:
        self.sides.append(LazyStream("side", eager=self.eager_side))
        return self.sides[-1]

    def current_stream(self) -> LazyStream:
        return self.forward

    def record(self, stream: LazyStream) -> LazyEvent:
        with self.lock:
            return LazyEvent(self, stream)

    def wait(self, stream: LazyStream, event: LazyEvent) -> None:
        self.enqueue(stream, event.synchronize)

    def zeros(self, rows: int, size: int) -> torch.Tensor:
        return torch.zeros((rows, size), dtype=torch.uint8)

    def scratch(self, count: int) -> list[int]:
        return [-1] * count

    def gather(self, gathers: Sequence[Gather], stream: LazyStream, scratch: list[int], at: int) -> None:
        """The rows are those that the scratch holds when the gather runs."""
        check_gathers(gathers)
        rows = [row for each in gathers for row in each.rows]
        scratch[at : at + len(rows)] = rows

        def run() -> None:
            begin = at
            for each in gathers:
                end = begin + len(each.rows)
                gather_on_host([Gather(each.lanes, scratch[begin:end], each.start)])
                begin = end

        self.enqueue(stream, run)

    def copy(self, copies: Sequence[Copies], stream: LazyStream) -> None:
        for each in copies:
            each.target.check(each.target_rows)
            each.source.check(each.source_rows)
        self.enqueue(stream, lambda: copy_on_host(copies))
        if self.failing_copies:
            raise RuntimeError("the copy engine is on fire")

    def pin(self, address: int, nbytes: int) -> str | None:
        if self.pin_error is None:
            self.pinned[address] = nbytes
        return self.pin_error

    def unpin(self, address: int) -> None:
        del self.pinned[address]
