"""What S3 asks of a client whichever library sends the requests: the order of checks, batches and pages.

A client adds how one request is sent, and turns its library's errors into `StoreError`s.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from s3kv.errors import AlreadyExists, NotFound, PreconditionFailed, StoreError
from s3kv.settings import StoreSettings
from s3kv.store.base import (
    DELETE_BATCH_KEYS,
    LIST_PAGE_KEYS,
    Body,
    Capabilities,
    DeleteError,
    Failures,
    Page,
)
from s3kv.store.buffers import check_ranges, copy_pieces, for_each
from s3kv.store.keys import check_key, check_prefix, check_start_after
from s3kv.store.reads import DerivedReads
from s3kv.store.s3_config import S3Config
from s3kv.store.spans import Span, plan_spans


class S3Client(DerivedReads):
    """Conditional headers are sent as asked for: `ConditionalStore` knows whether the store honours them."""

    def __init__(self, settings: StoreSettings, config: S3Config) -> None:
        self._settings = settings
        self._config = config
        self._express = config.location.express

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(None, None, start_after=not self._express)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
        flat = check_ranges(ranges, outs)
        check_key(key)

        async def read(span: Span) -> None:
            only = flat[span.members[0]] if len(span.members) == 1 else None
            got = await self._read_span(key, span, only)
            if got is only:
                return
            members = [(flat[index], ranges[index][0] - span.start) for index in span.members]
            await copy_pieces([(out, got[at : at + out.nbytes]) for out, at in members])

        await for_each(plan_spans(ranges), read)

    @abstractmethod
    async def _read_span(self, key: str, span: Span, only: memoryview | None) -> memoryview:
        """The bytes of `span`. A library that reads into a given buffer fills `only`, the one output, and returns it.

        Raises CorruptData when the object ends before the span does.
        """

    async def put(self, key: str, body: Body) -> str:
        return await self._put(key, body)

    async def put_if_absent(self, key: str, body: Body) -> str:
        try:
            return await self._put(key, body, if_absent=True)
        except PreconditionFailed as error:
            raise AlreadyExists(f"object {key} exists") from error

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        try:
            return await self._put(key, body, if_match=etag)
        except NotFound as error:  # S3 answers 404 to If-Match where nothing is
            raise PreconditionFailed(f"object {key} is gone") from error

    @abstractmethod
    async def _put(self, key: str, body: Body, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """One put, with at most one of the conditions. Returns the etag. Raises PreconditionFailed as S3 answers it."""

    async def list(self, prefix: str, start_after: str | None = None) -> AsyncIterator[Page]:
        check_prefix(prefix)
        check_start_after(start_after)
        pages = self._sorted_pages(prefix, start_after) if self._express else self._pages(prefix, start_after)
        async for page in pages:
            yield page

    async def _sorted_pages(self, prefix: str, start_after: str | None) -> AsyncIterator[Page]:
        """Directory buckets list in no order and cannot begin after a key: everything is read, sorted and skipped."""
        found = [meta async for page in self._pages(prefix, None) for meta in page]
        found = sorted((meta for meta in found if meta.key > (start_after or "")), key=lambda meta: meta.key)
        for at in range(0, len(found), LIST_PAGE_KEYS):
            yield found[at : at + LIST_PAGE_KEYS]

    @abstractmethod
    def _pages(self, prefix: str, start_after: str | None) -> AsyncIterator[Page]:
        """Pages as the bucket gives them, without names that `check_key` refuses and without empty pages."""

    async def delete(self, keys: Sequence[str]) -> Failures:
        checked = [check_key(key) for key in keys]
        if self._settings.delete_mode == "single":
            return await self._delete_singly(checked)
        failures: Failures = []
        for at in range(0, len(checked), DELETE_BATCH_KEYS):
            try:
                failures += await self._delete_batch(checked[at : at + DELETE_BATCH_KEYS])
            except StoreError as error:
                if at == 0:
                    raise
                return failures + [DeleteError(key, error) for key in checked[at:]]
        return failures

    @abstractmethod
    async def _delete_batch(self, keys: Sequence[str]) -> Failures:
        """One bulk delete. Raises StoreError when it failed altogether."""

    @abstractmethod
    async def _delete_singly(self, keys: Sequence[str]) -> Failures:
        """One request a key, see `delete_each`."""


async def delete_each(keys: Sequence[str], send: Callable[[str], Awaitable[object]]) -> Failures:
    """`send` deletes one key. Several at a time; a key that is not there counts as deleted."""
    failures: Failures = []

    async def delete_one(key: str) -> None:
        try:
            await send(key)
        except NotFound:
            pass
        except StoreError as error:
            failures.append(DeleteError(key, error))

    await for_each(keys, delete_one)
    return failures
