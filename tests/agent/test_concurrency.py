from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from s3kv.agent.publisher import Publisher
from s3kv.agent.together import in_thread, together
from s3kv.agent.weights import ByteSemaphore
from s3kv.errors import Transient
from s3kv.format.records import Touched


async def test_together_leaves_nothing_running_after_a_failure() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("slow")

    async def failing() -> None:
        await asyncio.sleep(0)
        raise Transient("no")

    with pytest.raises(Transient):
        await together([slow(), failing(), slow()])
    assert ended == ["slow", "slow"]


async def test_a_thread_runs_to_its_end_before_a_cancellation_goes_on() -> None:
    release, finished = threading.Event(), threading.Event()

    def work() -> None:
        release.wait()
        finished.set()

    with ThreadPoolExecutor(1) as pool:
        task = asyncio.ensure_future(together([in_thread(pool, work)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert finished.is_set()


async def test_a_byte_semaphore_is_fair_and_survives_cancellation() -> None:
    semaphore = ByteSemaphore(10)
    order: list[str] = []
    gates = {name: asyncio.Event() for name in "abcd"}

    async def use(name: str, size: int) -> None:
        async with semaphore.take(size):
            order.append(name)
            await gates[name].wait()

    tasks = {name: asyncio.create_task(use(name, size)) for name, size in (("a", 8), ("b", 50), ("c", 1), ("d", 2))}
    await asyncio.sleep(0)
    assert order == ["a"]
    tasks["b"].cancel()
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    assert order == ["a", "c"]
    gates["a"].set()
    gates["c"].set()
    gates["d"].set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order == ["a", "c", "d"]
    assert semaphore.used == 0


async def test_a_place_that_comes_free_as_its_waiter_is_cancelled_goes_to_the_next() -> None:
    semaphore = ByteSemaphore(10)
    release = asyncio.Event()
    served: list[str] = []

    async def use(name: str) -> None:
        async with semaphore.take(10):
            served.append(name)
            await release.wait()

    first, second, third = (asyncio.create_task(use(name)) for name in "abc")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    release.set()
    second.cancel()  # the first gives its place back before the second learns of that
    results = await asyncio.gather(first, second, third, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), asyncio.CancelledError, type(None)]
    assert (served, semaphore.used) == (["a", "c"], 0)


async def test_records_of_one_interval_share_a_segment_and_a_failure_reaches_each_caller() -> None:
    segments: list[int] = []
    broken = False

    async def publish(records: object) -> None:
        if broken:
            raise Transient("down")
        segments.append(len(records))  # type: ignore[arg-type]

    publisher = Publisher(publish, 0.01)
    await asyncio.gather(*(publisher.publish(Touched(bytes(16), hour)) for hour in range(5)))
    assert segments == [5]
    broken = True
    results = await asyncio.gather(
        *(publisher.publish(Touched(bytes(16), hour)) for hour in range(3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [Transient] * 3
    broken = False
    await publisher.publish(Touched(bytes(16), 9))
    assert segments == [5, 1]
