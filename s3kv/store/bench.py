"""How fast a store is at what s3kv does with it (puts, gets, first bytes), and what that is worth."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from s3kv.errors import PermissionDenied
from s3kv.store.base import Store
from s3kv.store.scratch import remove_scratch

MIB = 1 << 20
FIRST_BYTE_READ = 1024


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second over all connections together, and seconds of single calls."""

    objects: int
    object_bytes: int
    concurrency: int
    put_bytes_s: float
    get_bytes_s: float
    first_byte_s: tuple[float, ...]
    left_objects: int = 0
    """Put and still there: the credentials may not delete, as a node's need not."""

    @property
    def first_byte_median_s(self) -> float:
        return statistics.median(self.first_byte_s)

    @property
    def first_byte_p99_s(self) -> float:
        return sorted(self.first_byte_s)[min(len(self.first_byte_s) - 1, int(0.99 * len(self.first_byte_s)))]


async def measure_store(
    store: Store,
    prefix: str,
    body: bytes,
    *,
    objects: int,
    concurrency: int,
    clock: Callable[[], float],
    progress: Callable[[int], None] = lambda size: None,
) -> Rates:
    """Puts and gets `objects` copies of `body` under `prefix` and removes them, also when stopped or failed.

    Raises what the store raises. Keys under `prefix` must be nobody else's.
    """
    keys = [f"{prefix}{number:06d}" for number in range(objects)]
    try:
        began = clock()
        await _all(keys, concurrency, lambda key: _put(store, key, body, progress))
        put_s = clock() - began
        first = [await _timed(store, key, clock) for key in keys[: min(objects, 32)]]
        began = clock()
        await _all(keys, concurrency, lambda key: _get(store, key, len(body), progress))
        get_s = clock() - began
    except BaseException:
        await remove_scratch(store, keys)
        raise
    left = await _remove(store, keys)
    total = objects * len(body)
    return Rates(
        objects, len(body), concurrency, total / max(put_s, 1e-9), total / max(get_s, 1e-9), tuple(first), left
    )


async def _remove(store: Store, keys: list[str]) -> int:
    """How many could not be removed."""
    try:
        return len(await store.delete(keys))
    except PermissionDenied:
        return len(keys)


async def _all(keys: list[str], concurrency: int, work: Callable[[str], Awaitable[None]]) -> None:
    waiting = iter(keys)

    async def worker() -> None:
        for key in waiting:
            await work(key)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(keys))):
            group.create_task(worker())


async def _put(store: Store, key: str, body: bytes, progress: Callable[[int], None]) -> None:
    await store.put(key, body)
    progress(len(body))


async def _get(store: Store, key: str, size: int, progress: Callable[[int], None]) -> None:
    await store.get_into(key, memoryview(bytearray(size)))
    progress(size)


async def _timed(store: Store, key: str, clock: Callable[[], float]) -> float:
    began = clock()
    await store.get_into(key, memoryview(bytearray(FIRST_BYTE_READ)))
    return clock() - began


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Loading `tokens` takes `latency_s + tokens * load_s_per_token`, computing them `tokens * compute_s_per_token`."""

    load_tokens_s: float
    compute_tokens_s: float
    tokens: int | None
    """From this prompt length loading is faster; None when it never is."""


def break_even(rates: Rates, *, bytes_per_token: float, prefill_tokens_s: float, ratio: float = 1.0) -> BreakEven:
    """`bytes_per_token` of KV over all shards; `ratio` is how much the codec shrinks them; values must be positive."""
    load_s = bytes_per_token / ratio / rates.get_bytes_s
    compute_s = 1.0 / prefill_tokens_s
    tokens = None if load_s >= compute_s else int(rates.first_byte_median_s / (compute_s - load_s)) + 1
    return BreakEven(1.0 / load_s, prefill_tokens_s, tokens)
