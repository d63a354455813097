"""A store that passes everything on: the base of stores that change one thing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from s3kv.store.base import Body, Capabilities, Failures, Names, ObjectMeta, Page, Store


class StoreWrapper:
    def __init__(self, inner: Store) -> None:
        self._inner = inner

    @property
    def inner(self) -> Store:
        return self._inner

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    async def get_into(self, key: str, out: memoryview, offset: int = 0) -> int:
        return await self._inner.get_into(key, out, offset)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
        await self._inner.get_ranges(key, ranges, outs)

    async def get(self, key: str, max_bytes: int) -> bytes:
        return await self._inner.get(key, max_bytes)

    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        return await self._inner.get_with_etag(key, max_bytes)

    async def put(self, key: str, body: Body) -> str:
        return await self._inner.put(key, body)

    async def put_if_absent(self, key: str, body: Body) -> str:
        return await self._inner.put_if_absent(key, body)

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        return await self._inner.put_if_match(key, body, etag)

    async def head(self, key: str) -> ObjectMeta:
        return await self._inner.head(key)

    def list(self, prefix: str, start_after: str | None = None) -> AsyncIterator[Page]:
        return self._inner.list(prefix, start_after)

    async def list_prefixes(self, prefix: str) -> Names:
        return await self._inner.list_prefixes(prefix)

    async def delete(self, keys: Sequence[str]) -> Failures:
        return await self._inner.delete(keys)

    async def close(self) -> None:
        await self._inner.close()
