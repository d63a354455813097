"""The breaker by itself, faults by seed, what is imported, what is said."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from s3kv.errors import BreakerOpen, CorruptData, StoreTimeout, Transient
from s3kv.settings import StoreSettings
from s3kv.store import describe_failure
from s3kv.store.breaker import Breaker, State
from s3kv.store.faults import Fault, FaultPlan, FaultStore
from s3kv.store.memory import MemoryStore


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def breaker(clock: Clock, states: list[State]) -> Breaker:
    return Breaker(2, 5.0, clock, states.append)


def test_calls_from_before_an_opening_do_not_decide_after_it() -> None:
    clock, states = Clock(), list[State]()
    guard = breaker(clock, states)
    stalled = [guard.admit() for _ in range(6)]
    guard.failed(stalled[0])
    guard.failed(stalled[1])
    assert guard.state == "open"
    guard.succeeded(stalled[2])
    assert guard.state == "open", "an old success says nothing about now"
    clock.now = 5.0
    probe = guard.admit()
    guard.failed(stalled[3])
    guard.succeeded(probe)
    guard.failed(stalled[4])
    guard.failed(stalled[5])
    assert states == ["open", "half_open", "closed"]


def test_a_failed_probe_waits_the_whole_time_again() -> None:
    clock, states = Clock(), list[State]()
    guard = breaker(clock, states)
    for _ in range(2):
        guard.failed(guard.admit())
    clock.now = 5.0
    guard.failed(guard.admit())
    clock.now = 9.9
    with pytest.raises(BreakerOpen):
        guard.admit()
    clock.now = 10.0
    guard.succeeded(guard.admit())
    assert states == ["open", "half_open", "open", "half_open", "closed"]


def test_a_success_forgets_failures() -> None:
    clock, states = Clock(), list[State]()
    guard = breaker(clock, states)
    for _ in range(5):
        guard.failed(guard.admit())
        guard.succeeded(guard.admit())
    assert states == []


async def harm(seed: int) -> tuple[list[str], dict[Fault, int]]:
    plan = FaultPlan(seed, {fault: 0.1 for fault in Fault if fault is not Fault.STALL}, latency_s=0.0)
    store, results = FaultStore(MemoryStore(), plan), []
    for i in range(200):
        try:
            await store.put(f"k{i % 7}", b"0123456789")
            results.append(repr(await store.get(f"k{i % 7}", 10)))
        except Exception as error:
            results.append(type(error).__name__)
    return results, plan.counts


async def test_the_same_seed_does_the_same_harm() -> None:
    first, counts = await harm(7)
    assert (first, counts) == await harm(7)
    assert first != (await harm(8))[0]
    assert {Fault.WRONG_BYTES, Fault.TRUNCATED, Fault.WRONG_LENGTH, Fault.ERROR_AFTER, Fault.DENIED} <= counts.keys()
    assert Fault.PARTIAL_DELETE not in counts, "faults meet only calls that they fit"


async def test_wrong_bytes_differ_in_one_bit() -> None:
    plan = FaultPlan(3)
    store = FaultStore(MemoryStore(), plan)
    await store.put("k", bytes(100))
    plan.expect("get", Fault.WRONG_BYTES, Fault.WRONG_BYTES)
    slot = bytearray(100)
    await store.get_into("k", memoryview(slot))
    assert sum(byte.bit_count() for byte in slot) == 1
    assert sum(byte.bit_count() for byte in await store.get("k", 100)) == 1


async def test_a_stall_ends_when_it_is_cancelled() -> None:
    plan = FaultPlan()
    plan.expect("put", Fault.STALL)
    task = asyncio.ensure_future(FaultStore(MemoryStore(), plan).put("k", b""))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


IMPORTS = """
import sys
import s3kv.store
from s3kv.settings import StoreSettings
s3kv.store.open_store(StoreSettings(url="s3://bucket/p", region="us-east-1"))
heavy = {"boto3", "botocore", "aioboto3", "aiobotocore", "aiohttp", "torch", "numpy", "pytest"} & sys.modules.keys()
print(sorted(heavy))
"""


def test_case_34_opening_a_store_imports_neither_torch_nor_botocore() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BreakerOpen("x"), "not asked again for 5 s"),
        (StoreTimeout("get k: no answer in time"), "store.request_timeout_s (or S3KV_STORE__REQUEST_TIMEOUT_S) is 30"),
        (Transient("the\nlines"), "the lines"),
        (CorruptData("object k ends early"), "object k ends early"),
        (KeyError("secret detail"), "KeyError while talking to s3://bucket/p"),
    ],
)
def test_failures_are_described_in_one_line(error: Exception, said: str) -> None:
    line = describe_failure(error, StoreSettings(url="s3://bucket/p"))
    assert said in line and "\n" not in line
