"""Memory that repeats: rows of bytes, at a stride, in a page pool, in the ring or in an arena.

Invariant kept here: row numbers become addresses or indices only once they are known to be in `[0, rows)`. -1 is a
valid subscript in Python and in torch, and would be the pool's last page: another request's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]

_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
"""Element types of 16 to 1 bytes, for kernels that move one element a thread."""


@dataclass(frozen=True)
class Strip:
    """Row i is the `size` bytes at `base + stride * i`; `view` is uint8 `[rows, size]` over the same memory."""

    base: int
    size: int
    stride: int
    rows: int
    view: torch.Tensor

    @classmethod
    def of(cls, view: torch.Tensor) -> Strip:
        """`view`: uint8, two dimensions, its rows contiguous."""
        rows, size = view.shape
        return cls(view.data_ptr(), size, view.stride(0), rows, view)

    def narrow(self, offset: int, size: int) -> Strip:
        """Bytes `[offset, offset + size)` of every row."""
        return Strip.of(self.view.narrow(1, offset, size))

    def addresses(self, rows: Numbers) -> Numbers:
        """Raises IndexError when a row is outside the strip."""
        self.check(rows)
        return self.base + self.stride * rows

    def check(self, rows: Numbers) -> None:
        if rows.size:
            self.check_bounds(int(rows.min()), int(rows.max()))

    def check_bounds(self, low: int, high: int) -> None:
        if low < 0 or high >= self.rows:
            raise IndexError(f"rows {low} to {high} are not all in [0, {self.rows})")

    def alignment(self) -> int:
        """The widest of 16, 8, 4, 2, 1 bytes that divides every row's address and size."""
        together = self.base | self.stride | self.size | 16
        return together & -together

    def words(self, width: int) -> torch.Tensor:
        """`[rows, size // width]` of an element type of `width` bytes; `width` divides `alignment()`."""
        return self.view.view(next(dtype for dtype in _WORDS if dtype.itemsize == width))


@dataclass(frozen=True)
class Copies:
    """Row `source_rows[i]` of `source` goes to row `target_rows[i]` of `target`; both strips have one row size."""

    target: Strip
    target_rows: Numbers
    source: Strip
    source_rows: Numbers


@dataclass(frozen=True)
class Lane:
    """From rows of one strip to rows of another of one size, in the widest element type that both strips allow.

    The views are made once: each costs torch microseconds, and a gather happens on the executor's thread. By elements
    of `width` bytes, since bytes one by one would cost a GPU a thread each.
    """

    source: Strip
    target: Strip
    source_words: torch.Tensor
    target_words: torch.Tensor

    @classmethod
    def of(cls, source: Strip, target: Strip) -> Lane:
        width = min(source.alignment(), target.alignment())
        return cls(source, target, source.words(width), target.words(width))


@dataclass(frozen=True, slots=True)
class Gather:
    """Row `rows[i]` of each lane's source goes to row `start + i` of its target."""

    lanes: Sequence[Lane]
    rows: list[int]
    start: int

    def check(self) -> None:
        """Raises IndexError when a row is outside a strip."""
        if not self.rows:
            return
        low, high = min(self.rows), max(self.rows)
        for lane in self.lanes:
            lane.source.check_bounds(low, high)
            lane.target.check_bounds(self.start, self.start + len(self.rows) - 1)


def numbers(values: Sequence[int]) -> Numbers:
    return np.fromiter(values, dtype=np.int64, count=len(values))


class _CudaBytes:
    """Presents device memory to torch, which makes a view of it and copies nothing."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def tensor_at(base: int, size: int, stride: int, rows: int, device: torch.device) -> torch.Tensor:
    """A uint8 view `[rows, size]` of memory known by its address. The memory must outlive it."""
    extent = stride * (rows - 1) + size
    if device.type == "cuda":
        flat = torch.as_tensor(_CudaBytes(base, extent), device=device)
    else:
        flat = torch.frombuffer((ctypes.c_uint8 * extent).from_address(base), dtype=torch.uint8)
    return flat.as_strided((rows, size), (stride, 1))
