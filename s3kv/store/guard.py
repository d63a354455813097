"""What makes a store safe to call: a deadline for each call, retries within it, a circuit breaker, a limit of calls.

A call that fails is tried again after a random pause (full jitter: between 0 and an exponentially growing cap) as long
as the error is Transient, tries are left, and the pause ends before the deadline. A try may use up `ATTEMPT_SHARE` of
the deadline, so that one connection that stalls leaves time for another. Waiting for a free place counts too.

The breaker counts calls, not tries: a burst of 503 that retries get through is not an outage. Every kind of failure of
the store counts, HTTP errors and refused credentials as well; answers that say something about one object do not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from s3kv.errors import (
    AlreadyExists,
    CorruptData,
    NotFound,
    PreconditionFailed,
    StoreError,
    StoreTimeout,
    Transient,
    Unsupported,
)
from s3kv.settings import StoreSettings
from s3kv.store.base import DELETE_BATCH_KEYS, Body, DeleteError, Failures, Names, ObjectMeta, Page, Store
from s3kv.store.breaker import Breaker, State
from s3kv.store.buffers import body_parts, body_size
from s3kv.store.wrapper import StoreWrapper

ATTEMPT_SHARE = 0.6
ABOUT_ONE_OBJECT = (NotFound, AlreadyExists, PreconditionFailed, CorruptData, Unsupported)
"""Errors after which the store is as well as after a success."""

T = TypeVar("T")


class StoreEvents(Protocol):
    """Hooks for metrics; called on the event loop, must return at once and not raise."""

    def call(self, operation: str, outcome: str, seconds: float, size: int) -> None:
        """A call has ended. `outcome`: "ok", "cancelled" or the error's class; `size`: bytes asked for or sent."""

    def retry(self, operation: str, outcome: str) -> None:
        """A try has failed with this error's class name and will be repeated."""

    def breaker(self, state: State) -> None:
        """The circuit breaker has a new state."""


class NoEvents:
    def call(self, operation: str, outcome: str, seconds: float, size: int) -> None:
        pass

    def retry(self, operation: str, outcome: str) -> None:
        pass

    def breaker(self, state: State) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Limits:
    deadline_s: float
    retries: int
    backoff_initial_s: float
    backoff_max_s: float
    breaker_failures: int
    breaker_reset_s: float
    max_calls: int
    patience_s: float
    """A call that its caller gives up after this long counts as a failure for the breaker: callers with deadlines
    shorter than `deadline_s` would otherwise hide an outage of stalls from it."""

    @classmethod
    def from_settings(cls, settings: StoreSettings) -> Limits:
        return cls(
            deadline_s=settings.request_timeout_s,
            retries=settings.retries,
            backoff_initial_s=settings.backoff_initial_s,
            backoff_max_s=settings.backoff_max_s,
            breaker_failures=settings.breaker_failures,
            breaker_reset_s=settings.breaker_reset_s,
            max_calls=settings.max_connections,
            patience_s=settings.connect_timeout_s,
        )


class GuardedStore(StoreWrapper):
    """Every call ends within `limits.deadline_s`; a listing's pages and a delete's batches are calls of their own."""

    def __init__(
        self,
        inner: Store,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
        events: StoreEvents | None = None,
    ) -> None:
        super().__init__(inner)
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._events = events or NoEvents()
        self._breaker = Breaker(limits.breaker_failures, limits.breaker_reset_s, clock, self._events.breaker)
        self._places = asyncio.Semaphore(limits.max_calls)

    @property
    def breaker_state(self) -> State:
        return self._breaker.state

    async def get_into(self, key: str, out: memoryview, offset: int = 0) -> int:
        return await self._call("get", lambda: self._inner.get_into(key, out, offset), out.nbytes)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
        size = sum(out.nbytes for out in outs)
        await self._call("get", lambda: self._inner.get_ranges(key, ranges, outs), size)

    async def get(self, key: str, max_bytes: int) -> bytes:
        return await self._call("get", lambda: self._inner.get(key, max_bytes))

    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        return await self._call("get", lambda: self._inner.get_with_etag(key, max_bytes))

    async def put(self, key: str, body: Body) -> str:
        return await self._call("put", lambda: self._inner.put(key, body), body_size(body_parts(body)))

    async def put_if_absent(self, key: str, body: Body) -> str:
        return await self._call("put", lambda: self._inner.put_if_absent(key, body), body_size(body_parts(body)))

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        return await self._call("put", lambda: self._inner.put_if_match(key, body, etag), body_size(body_parts(body)))

    async def head(self, key: str) -> ObjectMeta:
        return await self._call("head", lambda: self._inner.head(key))

    async def list_prefixes(self, prefix: str) -> Names:
        return await self._call("list", lambda: self._inner.list_prefixes(prefix))

    async def list(self, prefix: str, start_after: str | None = None) -> AsyncIterator[Page]:
        """A page that fails is asked for again from the last key that was given out."""
        cursor = _Cursor(self._inner, prefix, start_after)
        while page := await self._call("list", cursor.next_page):
            yield page

    async def delete(self, keys: Sequence[str]) -> Failures:
        """Keys whose deletion failed with a Transient error are asked for again, within the batch's deadline."""
        failures: Failures = []
        for at in range(0, len(keys), DELETE_BATCH_KEYS):
            try:
                failures += await self._delete_batch(keys[at : at + DELETE_BATCH_KEYS])
            except StoreError as error:
                if at == 0:
                    raise
                return failures + [DeleteError(key, error) for key in keys[at:]]
        return failures

    async def _delete_batch(self, keys: Sequence[str]) -> Failures:
        pending = list(keys)
        final: Failures = []

        async def attempt() -> None:
            failures = await self._inner.delete(pending)
            passing = [failure for failure in failures if isinstance(failure.error, Transient)]
            final.extend(failure for failure in failures if failure not in passing)
            pending[:] = [failure.key for failure in passing]
            if passing:
                raise _StillThere(passing)

        try:
            await self._call("delete", attempt)
        except _StillThere as error:
            final.extend(error.failures)
        return final

    async def _call(self, operation: str, attempt: Callable[[], Awaitable[T]], size: int = 0) -> T:
        began = self._clock()
        outcome = "cancelled"
        try:
            async with asyncio.timeout(self._limits.deadline_s), self._places:
                result = await self._through_breaker(operation, attempt, began)
            outcome = "ok"
            return result
        except TimeoutError as error:
            outcome = StoreTimeout.__name__
            raise StoreTimeout(f"{operation}: not done within {self._limits.deadline_s:g} s") from error
        except Exception as error:
            outcome = _name(error)
            raise
        finally:
            self._events.call(operation, outcome, self._clock() - began, size)

    async def _through_breaker(self, operation: str, attempt: Callable[[], Awaitable[T]], began: float) -> T:
        ticket = self._breaker.admit()
        try:
            result = await self._persistently(operation, attempt, began)
        except ABOUT_ONE_OBJECT:
            self._breaker.succeeded(ticket)
            raise
        except ValueError:  # the caller's mistake: nothing was sent
            self._breaker.cancelled(ticket)
            raise
        except asyncio.CancelledError:
            waited = self._clock() - began
            if waited >= min(self._limits.patience_s, self._limits.deadline_s):
                self._breaker.failed(ticket)
            else:
                self._breaker.cancelled(ticket)
            raise
        except BaseException:  # a panic in Rust is no Exception, and must not keep the place of the one probe
            self._breaker.failed(ticket)
            raise
        self._breaker.succeeded(ticket)
        return result

    async def _bounded(self, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._limits.deadline_s * ATTEMPT_SHARE):
                return await attempt()
        except TimeoutError as error:
            raise StoreTimeout("a try took too long") from error

    async def _persistently(self, operation: str, attempt: Callable[[], Awaitable[T]], began: float) -> T:
        """Retries are prepared when the first try has failed: that takes as long as a put spends in this process."""
        try:
            return await self._bounded(attempt)
        except Transient as error:
            failed: Transient | None = error

        async def go_on() -> T:
            nonlocal failed
            if failed is not None:
                first, failed = failed, None
                raise first
            return await self._bounded(attempt)

        result: T = await self._retrying(operation, began)(go_on)
        return result

    def _retrying(self, operation: str, began: float) -> AsyncRetrying:
        limits = self._limits

        def stop(state: RetryCallState) -> bool:
            late = self._clock() + state.upcoming_sleep >= began + limits.deadline_s
            return state.attempt_number > limits.retries or late or self._breaker.state == "open"

        def wait(state: RetryCallState) -> float:
            cap = min(limits.backoff_max_s, limits.backoff_initial_s * 2.0 ** (state.attempt_number - 1))
            return self._rng.uniform(0.0, cap)

        def tell(state: RetryCallState) -> None:
            failed = state.outcome.exception() if state.outcome else None
            self._events.retry(operation, _name(failed) if failed else "")

        return AsyncRetrying(
            sleep=self._sleep,
            retry=retry_if_exception_type(Transient),
            stop=stop,
            wait=wait,
            before_sleep=tell,
            reraise=True,
        )


def _name(error: BaseException) -> str:
    return Transient.__name__ if isinstance(error, _StillThere) else type(error).__name__


class _StillThere(Transient):
    def __init__(self, failures: Failures) -> None:
        super().__init__(f"{len(failures)} keys were not deleted")
        self.failures = failures


class _Cursor:
    """A listing that can be taken up again after an error."""

    def __init__(self, store: Store, prefix: str, start_after: str | None) -> None:
        self._store = store
        self._prefix = prefix
        self._last = start_after
        self._pages: AsyncIterator[Page] | None = None

    async def next_page(self) -> Page:
        """The next page, or an empty one at the end."""
        if self._pages is None:
            self._pages = self._store.list(self._prefix, self._last)
        try:
            page: Page = await anext(self._pages, [])
        except BaseException:
            self._pages = None  # a generator that raised is finished
            raise
        if page:
            self._last = page[-1].key
        return page
