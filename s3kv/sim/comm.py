"""Communication between the ranks of one engine: what the contract calls broadcast and allgather, and all-reduce."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from s3kv.sim.errors import ContractError


class Communicator(Protocol):
    """One rank's end. Every call is collective: all ranks make it, in the same order."""

    rank: int
    size: int

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""


class Solo:
    """The communicator of a single rank."""

    rank = 0
    size = 1

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        return value

    def allgather(self, value: Any) -> list[Any]:
        """The value, alone."""
        return [value]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        return tensor


class ThreadGroup:
    """Ranks that are threads of one process. A rank that fails calls `abort`, and the others' calls then raise."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, by rank. Raises ContractError when another rank has failed."""
        self._values[rank] = value
        try:
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise ContractError("another rank stopped") from None
        return values

    def abort(self) -> None:
        """Releases every rank that waits."""
        self._barrier.abort()


class ThreadRank:
    """One rank's end of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank, self.size, self._group = rank, group.size, group

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self._group.exchange(self.rank, value)[0]

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return self._group.exchange(self.rank, value)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, added up in rank order."""
        return torch.stack(self._group.exchange(self.rank, tensor)).sum(0)


class ProcessRank:
    """One rank's end of the default `torch.distributed` process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        torch.distributed.all_reduce(tensor)
        return tensor
