"""Objects in a dict: for tests, and as the model that other stores are compared with."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from s3kv.errors import AlreadyExists, CorruptData, NotFound, PreconditionFailed
from s3kv.store.base import LIST_PAGE_KEYS, Body, Capabilities, Failures, Names, ObjectMeta, Page
from s3kv.store.buffers import body_parts, check_ranges
from s3kv.store.keys import check_key, check_prefix, check_start_after
from s3kv.store.reads import DerivedReads, check_size


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    etag: str
    modified: float


class MemoryStore(DerivedReads):
    """Every call is atomic because none of them awaits. `clock` gives seconds since the epoch for `modified`."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,  # noqa: TID251 (the default of the argument)
        page_keys: int = LIST_PAGE_KEYS,
    ) -> None:
        self._objects: dict[str, _Object] = {}
        self._versions = itertools.count(1)
        self._clock = clock
        self._page_keys = page_keys

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_put=True, conditional_match=True)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
        flat = check_ranges(ranges, outs)
        check_key(key)
        if not any(out.nbytes for out in flat):
            return
        data = self._find(key).data
        for (offset, length), out in zip(ranges, flat, strict=True):
            if offset + length > len(data):
                raise CorruptData(f"object {key} ends at {len(data)}, before {offset + length}")
            out[:] = data[offset : offset + length]

    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        found = self._find(key)
        check_size(key, len(found.data), max_bytes)
        return found.data, found.etag

    async def put(self, key: str, body: Body) -> str:
        return self._write(key, body)

    async def put_if_absent(self, key: str, body: Body) -> str:
        if key in self._objects:
            raise AlreadyExists(f"object {key} exists")
        return self._write(key, body)

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        held = self._objects.get(check_key(key))
        if held is None or held.etag != etag:
            raise PreconditionFailed(f"object {key} has changed")
        return self._write(key, body)

    async def head(self, key: str) -> ObjectMeta:
        return self._meta(key, self._find(key))

    async def list(self, prefix: str, start_after: str | None = None) -> AsyncIterator[Page]:
        check_prefix(prefix)
        after = check_start_after(start_after)
        # str order is code point order, which is the order of the UTF-8 bytes.
        keys = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
        for first in range(0, len(keys), self._page_keys):
            page = [
                self._meta(key, self._objects[key])
                for key in keys[first : first + self._page_keys]
                if key in self._objects
            ]
            if page:
                yield page

    async def list_prefixes(self, prefix: str) -> Names:
        check_prefix(prefix)
        below = (key[len(prefix) :] for key in self._objects if key.startswith(prefix))
        return sorted({prefix + rest.partition("/")[0] + "/" for rest in below if "/" in rest})

    async def delete(self, keys: Sequence[str]) -> Failures:
        for key in [check_key(key) for key in keys]:
            self._objects.pop(key, None)
        return []

    async def close(self) -> None:
        """Keeps the objects: another holder of a named store may still use them."""

    def _find(self, key: str) -> _Object:
        found = self._objects.get(check_key(key))
        if found is None:
            raise NotFound(f"no object {key}")
        return found

    def _write(self, key: str, body: Body) -> str:
        data = b"".join(body_parts(body))
        etag = f"{next(self._versions):x}"
        self._objects[check_key(key)] = _Object(data, etag, self._clock())
        return etag

    @staticmethod
    def _meta(key: str, held: _Object) -> ObjectMeta:
        return ObjectMeta(key, len(held.data), held.etag, held.modified)
