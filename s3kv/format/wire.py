"""Bounded reading of hostile bytes: what every decoder of this package shares."""

from __future__ import annotations

from struct import Struct
from typing import Any

import xxhash

from s3kv.errors import CorruptData

Buffer = bytes | bytearray | memoryview

CHECKSUM = Struct("<Q")
CHECKSUM_BYTES = CHECKSUM.size


def flat(data: Buffer) -> memoryview:
    """`data` as a memoryview of single bytes, without a copy. It must be C-contiguous."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def checksum(data: Buffer) -> int:
    """xxh3_64 of `data`, seed 0: against damage, not against forgery."""
    return xxhash.xxh3_64_intdigest(data)


def need(condition: bool, what: str) -> None:
    """Raises CorruptData that says `what` is wrong unless `condition` holds."""
    if not condition:
        raise CorruptData(what)


def seal(body: bytes) -> bytes:
    """`body` followed by its checksum."""
    return body + CHECKSUM.pack(checksum(body))


def unseal(data: memoryview, what: str) -> memoryview:
    """`data` without the checksum at its end, which must be right."""
    need(len(data) >= CHECKSUM_BYTES, f"{what} is too short")
    body = data[:-CHECKSUM_BYTES]
    need(CHECKSUM.unpack(data[-CHECKSUM_BYTES:])[0] == checksum(body), f"{what} has a wrong checksum")
    return body


class Cursor:
    """A position in bytes that cannot pass their end."""

    __slots__ = ("data", "position", "what")

    def __init__(self, data: memoryview, what: str) -> None:
        self.data = data
        self.position = 0
        self.what = what

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def take(self, count: int) -> memoryview:
        """The next `count` bytes, as a view; CorruptData when fewer are left."""
        if count > len(self.data) - self.position:
            raise CorruptData(f"{self.what} ends early")
        start = self.position
        self.position = start + count
        return self.data[start : self.position]

    def unpack(self, layout: Struct) -> tuple[Any, ...]:
        return layout.unpack(self.take(layout.size))
