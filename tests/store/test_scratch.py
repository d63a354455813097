"""What was put to try a store out goes at the end, and nobody waits long for that once it has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from support.virtual_time import virtual_clock, virtual_time

from s3kv.errors import StoreError, StoreTimeout, Transient
from s3kv.settings import StoreSettings
from s3kv.store.base import Body, Failures
from s3kv.store.bench import measure_store
from s3kv.store.memory import MemoryStore
from s3kv.store.probe import Probe
from s3kv.store.scratch import GIVE_UP_S

PATIENCE_S = 30.0


class SilentStore(MemoryStore):
    """Answers nothing; callers give up as the guard does."""

    async def put(self, key: str, body: Body) -> str:
        return await self._silence()

    async def delete(self, keys: Sequence[str]) -> Failures:
        return await self._silence()

    async def _silence(self) -> Any:
        await asyncio.sleep(PATIENCE_S)
        raise StoreTimeout("no answer")


def bench(store: MemoryStore) -> Coroutine[Any, Any, Any]:
    return measure_store(store, "scratch/b/", bytes(2048), objects=3, concurrency=2, clock=virtual_clock)


def doctor(store: MemoryStore) -> Coroutine[Any, Any, Any]:
    settings = StoreSettings(url="memory://x")
    return Probe(store, settings, "scratch/d/", clock=virtual_clock, wall_clock=virtual_clock).run()


Work = Callable[[MemoryStore], Coroutine[Any, Any, Any]]


@pytest.mark.parametrize("work", [bench, doctor])
def test_cancelled_work_ends_as_cancelled_and_soon(work: Work) -> None:
    async def main() -> float:
        task = asyncio.create_task(work(SilentStore()))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return virtual_clock() - began

    with virtual_time() as run:
        began = 1000.0
        assert run(main()) == pytest.approx(1.0 + GIVE_UP_S)


def test_a_failure_is_told_and_not_that_of_the_clean_up() -> None:
    async def main() -> float:
        with pytest.raises(ExceptionGroup) as caught:
            await bench(SilentStore())
        assert all(isinstance(each, StoreTimeout) for each in caught.value.exceptions)
        return virtual_clock() - began

    with virtual_time() as run:
        began = 1000.0
        assert run(main()) == pytest.approx(PATIENCE_S + GIVE_UP_S)


@pytest.mark.parametrize("work", [bench, doctor])
def test_what_was_put_goes_when_work_is_cancelled(work: Work) -> None:
    class Stalling(MemoryStore):
        async def get_into(self, key: str, out: memoryview, offset: int = 0) -> int:
            reading.set()
            return await asyncio.Event().wait()

    async def main() -> list[str]:
        nonlocal reading
        reading = asyncio.Event()
        store = Stalling()
        task = asyncio.create_task(work(store))
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [meta.key async for page in store.list("") for meta in page]

    reading: asyncio.Event
    with virtual_time() as run:
        assert run(main()) == []


def test_a_bench_that_succeeds_tells_what_it_could_not_remove() -> None:
    class Failing(MemoryStore):
        async def delete(self, keys: Sequence[str]) -> Failures:
            raise Transient("the store broke off")

    with virtual_time() as run, pytest.raises(StoreError):
        run(bench(Failing()))
