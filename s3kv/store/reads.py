"""What every store's reads have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from s3kv.errors import CorruptData


class DerivedReads(ABC):
    """The two reads of `Store` that are cases of the other two; those check the key and the outputs."""

    async def get_into(self, key: str, out: memoryview, offset: int = 0) -> int:
        await self.get_ranges(key, [(offset, out.nbytes)], [out])
        return out.nbytes

    async def get(self, key: str, max_bytes: int) -> bytes:
        return (await self.get_with_etag(key, max_bytes))[0]

    @abstractmethod
    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None: ...

    @abstractmethod
    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]: ...


def check_size(key: str, size: int, max_bytes: int) -> None:
    """Raises CorruptData for an object that is larger than its reader allows; call it before the bytes are read."""
    if size > max_bytes:
        raise CorruptData(f"object {key} has {size} bytes, more than the {max_bytes} allowed")
