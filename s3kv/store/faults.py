"""A store that does harm by a plan: seeded, or scripted call by call. For tests, simulations and chaos runs.

Randomness comes from the plan's seed alone and is drawn in the order of calls, so a run that makes the same calls meets
the same faults.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeVar

from s3kv.errors import PermissionDenied, StoreError, StoreTimeout, Transient
from s3kv.store.base import Body, DeleteError, Failures, Names, ObjectMeta, Page, Store
from s3kv.store.wrapper import StoreWrapper

T = TypeVar("T")
Operation = Literal["get", "put", "head", "list", "delete"]


class Fault(StrEnum):
    LATENCY = "latency"  # a pause, then the call
    STALL = "stall"  # never returns; ends by cancellation only
    ERROR_BEFORE = "error_before"  # Transient, nothing done
    ERROR_AFTER = "error_after"  # done, then Transient: the answer was lost
    DENIED = "denied"  # PermissionDenied, nothing done
    TIMEOUT = "timeout"  # StoreTimeout, nothing done
    TRUNCATED = "truncated"  # reads: half of the bytes arrive, then Transient
    WRONG_BYTES = "wrong_bytes"  # reads: one bit differs, no error
    WRONG_LENGTH = "wrong_length"  # whole reads: the last byte is missing, no error; heads and lists: size off by one
    PARTIAL_DELETE = "partial_delete"  # deletes: every other key stays and is reported
    SLOW_LIST = "slow_list"  # lists: a pause before every page


_FITS: Mapping[Fault, Collection[str]] = {
    Fault.TRUNCATED: ("get",),
    Fault.WRONG_BYTES: ("get",),
    Fault.WRONG_LENGTH: ("get", "head", "list"),
    Fault.PARTIAL_DELETE: ("delete",),
    Fault.SLOW_LIST: ("list",),
}


@dataclass
class FaultPlan:
    """Which fault meets the next call.

    `rates`: probability of each fault, for every call that it fits; at most one fault a call. `script` goes first: an
    operation's list is used up from its front (None: a call without fault). `outage` True fails everything until it is
    False again. `counts` says what happened.
    """

    seed: int = 0
    rates: Mapping[Fault, float] = field(default_factory=dict)
    latency_s: float = 0.05
    script: dict[Operation, deque[Fault | None]] = field(default_factory=dict)
    outage: bool = False
    counts: dict[Fault, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def expect(self, operation: Operation, *faults: Fault | None) -> None:
        """Append to the script of `operation`."""
        self.script.setdefault(operation, deque()).extend(faults)

    def draw(self, operation: Operation) -> Fault | None:
        fault = self._next(operation)
        if fault is not None:
            self.counts[fault] = self.counts.get(fault, 0) + 1
        return fault

    def _next(self, operation: Operation) -> Fault | None:
        if self.outage:
            return Fault.ERROR_BEFORE
        if waiting := self.script.get(operation):
            return waiting.popleft()
        at = self._rng.random()
        for fault, rate in self.rates.items():
            if operation in _FITS.get(fault, (operation,)):
                at -= rate
                if at < 0:
                    return fault
        return None

    def flip(self, data: bytearray | memoryview) -> None:
        """Change one bit in place."""
        if len(data):
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)


class FaultStore(StoreWrapper):
    """`inner` seen through `plan`. `sleep` makes latency."""

    def __init__(
        self, inner: Store, plan: FaultPlan, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        super().__init__(inner)
        self.plan = plan
        self._sleep = sleep

    async def get_into(self, key: str, out: memoryview, offset: int = 0) -> int:
        await self.get_ranges(key, [(offset, out.nbytes)], [out])
        return out.nbytes

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
        fault = self.plan.draw("get")
        if fault is Fault.TRUNCATED:
            halves = [(offset, length // 2) for offset, length in ranges]
            await self._inner.get_ranges(key, halves, [out[: out.nbytes // 2] for out in outs])
            raise Transient(f"get {key}: injected: the body was cut")
        await self._with(fault, lambda: self._inner.get_ranges(key, ranges, outs))
        if fault is Fault.WRONG_BYTES and outs:
            self.plan.flip(outs[0])

    async def get(self, key: str, max_bytes: int) -> bytes:
        return (await self.get_with_etag(key, max_bytes))[0]

    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        fault = self.plan.draw("get")
        data, etag = await self._with(fault, lambda: self._inner.get_with_etag(key, max_bytes))
        if fault is Fault.TRUNCATED:
            raise Transient(f"get {key}: injected: the body was cut")
        if fault is Fault.WRONG_BYTES:
            changed = bytearray(data)
            self.plan.flip(changed)
            data = bytes(changed)
        return (data[:-1] if fault is Fault.WRONG_LENGTH else data), etag

    async def put(self, key: str, body: Body) -> str:
        return await self._with(self.plan.draw("put"), lambda: self._inner.put(key, body))

    async def put_if_absent(self, key: str, body: Body) -> str:
        return await self._with(self.plan.draw("put"), lambda: self._inner.put_if_absent(key, body))

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        return await self._with(self.plan.draw("put"), lambda: self._inner.put_if_match(key, body, etag))

    async def head(self, key: str) -> ObjectMeta:
        fault = self.plan.draw("head")
        meta = await self._with(fault, lambda: self._inner.head(key))
        return _longer(meta) if fault is Fault.WRONG_LENGTH else meta

    async def list(self, prefix: str, start_after: str | None = None) -> AsyncIterator[Page]:
        fault = self.plan.draw("list")
        await self._with(fault if fault is not Fault.ERROR_AFTER else None, _nothing)
        async for page in self._inner.list(prefix, start_after):
            if fault is Fault.SLOW_LIST:
                await self._sleep(self.plan.latency_s)
            yield [_longer(meta) for meta in page] if fault is Fault.WRONG_LENGTH else page
            if fault is Fault.ERROR_AFTER:
                raise Transient(f"list {prefix}: injected: no further page")

    async def list_prefixes(self, prefix: str) -> Names:
        return await self._with(self.plan.draw("list"), lambda: self._inner.list_prefixes(prefix))

    async def delete(self, keys: Sequence[str]) -> Failures:
        fault = self.plan.draw("delete")
        if fault is not Fault.PARTIAL_DELETE:
            return await self._with(fault, lambda: self._inner.delete(keys))
        stay = [DeleteError(key, Transient(f"delete {key}: injected")) for key in keys[::2]]
        return stay + await self._inner.delete(keys[1::2])

    async def _with(self, fault: Fault | None, call: Callable[[], Awaitable[T]]) -> T:
        if fault is Fault.LATENCY:
            await self._sleep(self.plan.latency_s)
        elif fault is Fault.STALL:
            await asyncio.Event().wait()
        elif fault is not None and (error := _REFUSALS.get(fault)):
            raise error(f"injected: {fault}")
        result = await call()
        if fault is Fault.ERROR_AFTER:
            raise Transient("injected: the answer was lost")
        return result


_REFUSALS: Mapping[Fault, type[StoreError]] = {
    Fault.ERROR_BEFORE: Transient,
    Fault.DENIED: PermissionDenied,
    Fault.TIMEOUT: StoreTimeout,
}


async def _nothing() -> None:
    pass


def _longer(meta: ObjectMeta) -> ObjectMeta:
    return ObjectMeta(meta.key, meta.size + 1, meta.etag, meta.modified)
