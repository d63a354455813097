"""Streams: the CUDA ones, and stand-ins on the CPU, where work is done by the time it is enqueued."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class HostEvent:
    """An event of a `HostStream`. It has always happened, because the CPU's work is done when it is enqueued."""

    def record(self, stream: Any = None) -> None:
        """Marks the stream's position."""

    def wait(self, stream: Any = None) -> None:
        """Makes a stream wait for the event."""

    def synchronize(self) -> None:
        """Waits for the event."""

    def query(self) -> bool:
        """Whether the event has happened."""
        return True


class HostStream:
    """The part of `torch.cuda.Stream` that connectors use. Waiting for another's event or stream blocks the caller."""

    cuda_stream = 0
    device = torch.device("cpu")

    def wait_event(self, event: Any) -> None:
        """Later work runs after the event."""
        event.synchronize()

    def wait_stream(self, stream: Any) -> None:
        """Later work runs after everything enqueued on `stream`."""
        stream.synchronize()

    def record_event(self, event: Any = None) -> Any:
        """Records an event, a new one by default, and returns it."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Waits for everything enqueued."""

    def query(self) -> bool:
        """Whether everything enqueued is done."""
        return True


def make_stream(device: torch.device) -> Any:
    """The stream that the forward passes of a rank run on, after what the current stream has been given so far."""
    if device.type != "cuda":
        return HostStream()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def using(stream: Any) -> AbstractContextManager[Any]:
    """Makes a stream the current one of this thread."""
    return nullcontext() if isinstance(stream, HostStream) else torch.cuda.stream(stream)


def upload(values: list[int], device: torch.device) -> torch.Tensor:
    """An int64 tensor on the device, without waiting for it."""
    return send(torch.tensor(values, dtype=torch.int64), device)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The host's tensor on the device, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Download:
    """Values on their way to the host. `values` waits for them, and for nothing that was enqueued later."""

    def __init__(self, tensors: list[torch.Tensor], stream: Any) -> None:
        self._host = torch.cat(tensors)
        self._event: Any = None
        if self._host.is_cuda:
            pinned = torch.empty(self._host.shape, dtype=self._host.dtype, pin_memory=True)
            self._host = pinned.copy_(self._host, non_blocking=True)
            self._event = stream.record_event()

    def values(self) -> list[float]:
        """The values, in order."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values
