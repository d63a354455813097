"""CUDA, through torch and, for copies of many pages at once, cuda-python where it is installed.

Facts: cudaMemcpyBatchAsync and cudaHostRegister in the CUDA Runtime API reference; cuda-python's runtime bindings.
Measured on an H200: a batch costs 1.2 µs a page of CPU and reaches 53–55 GB/s, a loop of torch copies 12 µs a page.
Of one large pinned copy in the same run (docs/gpu.md): saves 0.86 to 0.90 at 64 KiB pages, over 0.94 from 256 KiB on;
loads 0.85 to 0.94 and over 0.96.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from s3kv.connector.device import Event, Stream, check_gathers
from s3kv.connector.numa import node_of, preferring
from s3kv.connector.strips import Copies, Gather, Numbers

logger = logging.getLogger("s3kv.connector")

_HOST_REGISTER_PORTABLE = 1
_BATCH_LIMIT = 256
"""Copies in one call. The device begins once a call returns, so a large one would make it wait for the first copy."""


class CudaDevice:
    """One GPU. Enqueues only; see `Device`."""

    pins = True

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._batch = _batch_copy()

    def adopt(self) -> None:
        torch.cuda.set_device(self._device)

    def new_stream(self) -> Stream:
        stream: Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return stream

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def record(self, stream: Stream) -> Event:
        # blocking: who synchronizes sleeps, instead of spinning beside the executor's thread.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def zeros(self, rows: int, size: int) -> torch.Tensor:
        return torch.zeros((rows, size), dtype=torch.uint8, device=self._device)

    def scratch(self, count: int) -> _Scratch:
        return _Scratch(count, self._device)

    def gather(self, gathers: Sequence[Gather], stream: Stream, scratch: _Scratch, at: int) -> None:
        check_gathers(gathers)
        rows = [row for each in gathers for row in each.rows]
        scratch.numbers[at : at + len(rows)] = rows
        with self._on(stream):
            numbers, begin = scratch.upload(at, len(rows)), 0
            for each in gathers:
                count = len(each.rows)
                index = numbers.narrow(0, begin, count)
                for lane in each.lanes:
                    out = lane.target_words.narrow(0, each.start, count)
                    torch.index_select(lane.source_words, 0, index, out=out)
                begin += count

    def _on(self, stream: Stream) -> AbstractContextManager[None]:
        """Changing torch's current stream there and back costs as much as the gather: mostly it is the current one."""
        if torch._C._cuda_getCurrentRawStream(self._device.index) == stream.cuda_stream:
            return nullcontext()
        chosen: AbstractContextManager[None] = torch.cuda.stream(stream)
        return chosen

    def copy(self, copies: Sequence[Copies], stream: Stream) -> None:
        if not copies:
            return
        if self._batch is not None:
            try:
                self._batch(_flatten(copies), stream)
                return
            except _BatchUnsupported as error:
                logger.warning("cudaMemcpyBatchAsync cannot be used (%s): pages are copied one by one", error)
                self._batch = None
        _copy_one_by_one(copies, stream)

    def pin(self, address: int, nbytes: int) -> str | None:
        with preferring(node_of(self._device)):
            code = int(_cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))
        if code == 0:
            return None
        self._forget_error()
        return f"cudaHostRegister of {nbytes} bytes gave CUDA error {code} (is locked memory limited? see ulimit -l)"

    def unpin(self, address: int) -> None:
        if int(_cudart().cudaHostUnregister(address)) != 0:
            self._forget_error()

    def _forget_error(self) -> None:
        """A failed call's code stays this thread's last error, and the next check of a kernel's launch would raise it,
        whoever launched it. Only the copy of the runtime that torch calls knows it; cuda.bindings has one of its own.
        """
        try:
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))
            library.cudaGetLastError()  # found in what the library itself is linked with
        except (OSError, AttributeError):
            # A runtime that is linked in and hidden: let torch make the check, on a kernel that nobody needs.
            with suppress(RuntimeError):
                torch.ones(1, device=self._device)


class _Scratch:
    """Row numbers on the host, pinned, or their upload would wait for the device; and their place on the device.

    Kept, because a fresh pinned tensor and its upload cost the executor's thread 0.2 ms after a pause (an H200's host).
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._pinned = torch.zeros(count, dtype=torch.int64, pin_memory=True)
        self._uploaded = torch.zeros(count, dtype=torch.int64, device=device)
        self.numbers = self._pinned.numpy()

    def upload(self, at: int, count: int) -> torch.Tensor:
        """On torch's current stream."""
        uploaded = self._uploaded.narrow(0, at, count)
        uploaded.copy_(self._pinned.narrow(0, at, count), non_blocking=True)
        return uploaded


Addresses = tuple[Numbers, Numbers, Numbers]
"""Targets, sources and sizes of copies, in bytes."""


def _flatten(copies: Sequence[Copies]) -> Addresses:
    """Neighbours on both sides become one copy: slots taken in a row, and ring rows, often are."""
    targets = np.concatenate([each.target.addresses(each.target_rows) for each in copies])
    sources = np.concatenate([each.source.addresses(each.source_rows) for each in copies])
    sizes = np.concatenate([np.full(len(each.source_rows), each.source.size, np.int64) for each in copies])
    apart = (targets[1:] != targets[:-1] + sizes[:-1]) | (sources[1:] != sources[:-1] + sizes[:-1])
    starts = np.flatnonzero(np.concatenate(([True], apart)))
    if not len(targets):
        return targets, sources, sizes
    return targets[starts], sources[starts], np.add.reduceat(sizes, starts)


def _copy_one_by_one(copies: Sequence[Copies], stream: Stream) -> None:
    with torch.cuda.stream(stream):
        for each in copies:
            target, source = each.target.view, each.source.view
            for to, come in zip(each.target_rows.tolist(), each.source_rows.tolist(), strict=True):
                target[to].copy_(source[come], non_blocking=True)


class _BatchUnsupported(Exception):
    """The driver or the memory does not take batches. Nothing of the batch was enqueued."""


class _BatchCopy:
    """cudaMemcpyBatchAsync: many copies, one call."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        attributes = runtime.cudaMemcpyAttributes()
        # Sources are read in stream order: ring rows and slots may be written again once the stream is past.
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self._attributes = [attributes]

    def __call__(self, copies: Addresses, stream: Stream) -> None:
        """Raises _BatchUnsupported when the first call is refused, RuntimeError when a later one is."""
        for start in range(0, len(copies[0]), _BATCH_LIMIT):
            targets, sources, sizes = (each[start : start + _BATCH_LIMIT].tolist() for each in copies)
            result = self._runtime.cudaMemcpyBatchAsync(
                targets, sources, sizes, len(sizes), self._attributes, [0], 1, stream.cuda_stream
            )
            if int(result[0]) != 0:
                failure = _BatchUnsupported if start == 0 else RuntimeError
                raise failure(str(result[0]))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _batch_copy() -> _BatchCopy | None:
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
        return _BatchCopy(runtime)
    except (ImportError, AttributeError) as error:
        logger.info("cudaMemcpyBatchAsync is not available (%s): pages are copied one by one", error)
        return None
