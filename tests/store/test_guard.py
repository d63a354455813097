"""Deadlines, retries, the breaker: in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from support.virtual_time import virtual_clock, virtual_time

from s3kv.errors import BreakerOpen, NotFound, PermissionDenied, StoreTimeout, Transient
from s3kv.store.breaker import State
from s3kv.store.faults import Fault, FaultPlan, FaultStore
from s3kv.store.guard import GuardedStore, Limits
from s3kv.store.memory import MemoryStore

LIMITS = Limits(
    deadline_s=10.0,
    retries=4,
    backoff_initial_s=0.1,
    backoff_max_s=2.0,
    breaker_failures=3,
    breaker_reset_s=5.0,
    max_calls=8,
    patience_s=5.0,
)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str, float]] = []
        self.retries: list[str] = []
        self.states: list[State] = []

    def call(self, operation: str, outcome: str, seconds: float, size: int) -> None:
        self.calls.append((operation, outcome, seconds))

    def retry(self, operation: str, outcome: str) -> None:
        self.retries.append(outcome)

    def breaker(self, state: State) -> None:
        self.states.append(state)


class Bench:
    """A guarded, faulty store over memory, under virtual time."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.memory = MemoryStore()
        self.plan = FaultPlan()
        self.seen = Recorder()
        faulty = FaultStore(self.memory, self.plan)
        self.store = GuardedStore(faulty, limits, clock=virtual_clock, rng=random.Random(1), events=self.seen)


Scenario = Callable[[Bench], Coroutine[Any, Any, None]]


def run(scenario: Scenario, limits: Limits = LIMITS) -> Bench:
    bench: list[Bench] = []

    async def main() -> None:
        bench.append(Bench(limits))
        await scenario(bench[0])

    with virtual_time() as runner:
        runner(main())
    return bench[0]


async def elapsed(call: Awaitable[Any]) -> float:
    began = virtual_clock()
    with pytest.raises(Exception):  # noqa: B017 (only how long it took matters)
        await call
    return virtual_clock() - began


def test_case_24_a_stall_ends_within_the_deadline_and_others_go_on() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.memory.put("k", b"x")
        bench.plan.expect("get", *[Fault.STALL] * 2)
        stalled = asyncio.ensure_future(elapsed(bench.store.get("k", 1)))
        await asyncio.sleep(1)
        bench.plan.expect("put", None)
        assert await bench.store.put("other", b"y")
        assert await stalled <= LIMITS.deadline_s
        assert await bench.store.get("k", 1) == b"x"

    bench = run(scenario)
    assert bench.seen.retries == ["StoreTimeout"]


def test_a_stalled_connection_leaves_time_for_another_try() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.memory.put("k", b"x")
        bench.plan.expect("get", Fault.STALL)
        assert await bench.store.get("k", 1) == b"x"

    assert run(scenario).seen.calls[0][1:] == ("ok", pytest.approx(6.0, abs=0.2))


def test_case_24_every_operation_has_a_deadline() -> None:
    async def scenario(bench: Bench) -> None:
        bench.plan.rates = {Fault.STALL: 1.0}
        out = memoryview(bytearray(1))
        store = bench.store

        async def listed() -> None:
            _ = [page async for page in store.list("")]

        calls = (
            lambda: store.get("k", 1),
            lambda: store.get_with_etag("k", 1),
            lambda: store.get_into("k", out),
            lambda: store.get_ranges("k", [(0, 1)], [out]),
            lambda: store.put("k", b""),
            lambda: store.put_if_absent("k", b""),
            lambda: store.put_if_match("k", b"", "e"),
            lambda: store.head("k"),
            lambda: store.list_prefixes(""),
            lambda: store.delete(["k"]),
            listed,
        )
        for call in calls:
            assert await elapsed(call()) <= LIMITS.deadline_s

    bench = run(scenario, Limits(10.0, 4, 0.1, 2.0, 1000, 5.0, 8, 5.0))
    assert {outcome for _, outcome, _ in bench.seen.calls} == {"StoreTimeout"}


def test_case_42_slow_down_three_times_then_success() -> None:
    async def scenario(bench: Bench) -> None:
        bench.plan.expect("put", *[Fault.ERROR_BEFORE] * 3, None)
        await bench.store.put("k", b"x")

    bench = run(scenario)
    assert bench.plan.counts == {Fault.ERROR_BEFORE: 3}
    assert bench.seen.retries == ["Transient"] * 3
    (_, outcome, seconds), *rest = bench.seen.calls
    assert (outcome, rest) == ("ok", [])
    assert 0 < seconds <= 0.1 + 0.2 + 0.4, "pauses are random, below a growing cap"


def test_case_42_tries_and_total_are_bounded() -> None:
    async def scenario(bench: Bench) -> None:
        bench.plan.outage = True
        assert await elapsed(bench.store.put("k", b"x")) <= 0.1 + 0.2 + 0.4 + 0.8

    assert run(scenario).plan.counts == {Fault.ERROR_BEFORE: 5}


def test_no_try_begins_after_the_deadline() -> None:
    async def scenario(bench: Bench) -> None:
        bench.plan.outage = True
        assert await elapsed(bench.store.put("k", b"x")) < 3.0

    run(scenario, Limits(3.0, 1000, 1.0, 1.0, 3, 5.0, 8, 5.0))


def test_answers_about_one_object_are_not_retried_and_not_counted() -> None:
    async def scenario(bench: Bench) -> None:
        for _ in range(20):
            with pytest.raises(NotFound):
                await bench.store.get("missing", 1)
            with pytest.raises(ValueError):
                await bench.store.get("bad//key", 1)

    bench = run(scenario)
    assert bench.seen.retries == [] and bench.seen.states == []


def test_refusals_are_counted_but_not_retried() -> None:
    async def scenario(bench: Bench) -> None:
        bench.plan.rates = {Fault.DENIED: 1.0}
        for _ in range(3):
            with pytest.raises(PermissionDenied):
                await bench.store.put("k", b"x")
        with pytest.raises(BreakerOpen):
            await bench.store.put("k", b"x")

    bench = run(scenario)
    assert bench.seen.retries == [] and bench.seen.states == ["open"]


def test_case_28_every_put_fails_then_it_recovers_without_a_restart() -> None:
    async def scenario(bench: Bench) -> None:
        bench.plan.outage = True
        outcomes = [await outcome(bench.store.put(f"k{i}", b"x")) for i in range(6)]
        assert outcomes == ["Transient"] * 3 + ["BreakerOpen"] * 3
        bench.plan.outage = False
        assert await outcome(bench.store.put("k", b"x")) == "BreakerOpen"
        await asyncio.sleep(LIMITS.breaker_reset_s)
        assert await outcome(bench.store.put("k", b"x")) == "ok"
        assert await outcome(bench.store.put("k2", b"x")) == "ok"

    bench = run(scenario)
    assert bench.seen.states == ["open", "half_open", "closed"]
    assert [outcome for _, outcome, _ in bench.seen.calls].count("Transient") == 3


def test_case_l3_fifty_seconds_of_stalls_then_recovery() -> None:
    """Eight callers keep calling. When the stalls end the breaker closes by itself, and calls that were stalled since
    before do not open it again."""

    async def scenario(bench: Bench) -> None:
        await bench.memory.put("k", b"x")
        bench.plan.rates = {Fault.STALL: 1.0}
        end = virtual_clock() + 100
        late: list[str] = []

        async def caller() -> None:
            while virtual_clock() < end:
                result = await outcome(bench.store.get("k", 1))
                if virtual_clock() > end - 20:
                    late.append(result)
                await asyncio.sleep(0.5)

        async def recovery() -> None:
            await asyncio.sleep(50)
            bench.plan.rates = {}

        await asyncio.gather(recovery(), *(caller() for _ in range(8)))
        assert set(late) == {"ok"}
        assert bench.store.breaker_state == "closed"

    bench = run(scenario)
    assert bench.seen.states[0] == "open" and bench.seen.states[-1] == "closed"


def test_callers_that_give_up_early_do_not_hide_an_outage() -> None:
    async def scenario(bench: Bench) -> None:
        bench.plan.rates = {Fault.STALL: 1.0}
        for patience, state in ((1.0, "closed"), (6.0, "open")):
            for _ in range(LIMITS.breaker_failures):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(patience):
                        await bench.store.get("k", 1)
            assert bench.store.breaker_state == state

    run(scenario)


def test_half_open_lets_one_call_through() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.memory.put("k", b"x")
        bench.plan.outage = True
        for _ in range(3):
            await outcome(bench.store.get("k", 1))
        bench.plan.outage = False
        await asyncio.sleep(LIMITS.breaker_reset_s)
        bench.plan.expect("get", Fault.LATENCY)
        results = await asyncio.gather(*(outcome(bench.store.get("k", 1)) for _ in range(5)))
        assert sorted(results) == ["BreakerOpen"] * 4 + ["ok"]

    run(scenario)


def test_a_cancelled_probe_does_not_hold_the_breaker_open() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.memory.put("k", b"x")
        bench.plan.outage = True
        for _ in range(3):
            await outcome(bench.store.get("k", 1))
        bench.plan.outage = False
        await asyncio.sleep(LIMITS.breaker_reset_s)
        bench.plan.expect("get", Fault.STALL)
        probe = asyncio.ensure_future(bench.store.get("k", 1))
        await asyncio.sleep(1)
        probe.cancel()
        await asyncio.wait([probe])
        assert await outcome(bench.store.get("k", 1)) == "ok"

    run(scenario)


def test_a_listing_goes_on_where_it_failed() -> None:
    async def scenario(bench: Bench) -> None:
        keys = [f"k/{i:04}" for i in range(2500)]
        for key in keys:
            await bench.memory.put(key, b"")
        bench.plan.expect("list", Fault.ERROR_AFTER, Fault.ERROR_AFTER, Fault.ERROR_AFTER)
        assert [meta.key async for page in bench.store.list("k/") for meta in page] == keys

    assert run(scenario).seen.retries == ["Transient"] * 3


def test_keys_that_a_delete_left_are_deleted_again() -> None:
    async def scenario(bench: Bench) -> None:
        keys = [f"k/{i:04}" for i in range(1500)]
        for key in keys:
            await bench.memory.put(key, b"")
        bench.plan.expect("delete", Fault.PARTIAL_DELETE, Fault.PARTIAL_DELETE, None)
        assert await bench.store.delete(keys) == []
        assert await bench.memory.list_prefixes("") == []

        await bench.memory.put("stays", b"")
        bench.plan.rates = {Fault.PARTIAL_DELETE: 1.0}
        failures = await bench.store.delete(["stays", "gone"])
        assert [failure.key for failure in failures] == ["stays"]
        assert isinstance(failures[0].error, Transient)

    run(scenario)


def test_a_lost_answer_of_put_if_absent_may_look_taken_but_is_stored() -> None:
    async def scenario(bench: Bench) -> None:
        bench.plan.expect("put", Fault.ERROR_AFTER, None)
        assert await outcome(bench.store.put_if_absent("k", b"x")) == "AlreadyExists"
        assert await bench.store.get("k", 1) == b"x"

    run(scenario)


def test_waiting_for_a_place_counts_against_the_deadline() -> None:
    async def scenario(bench: Bench) -> None:
        bench.plan.rates = {Fault.STALL: 1.0}
        times = await asyncio.gather(*(elapsed(bench.store.get("k", 1)) for _ in range(30)))
        assert max(times) <= LIMITS.deadline_s

    run(scenario, Limits(10.0, 4, 0.1, 2.0, 1000, 5.0, 2, 5.0))


async def outcome(call: Awaitable[Any]) -> str:
    try:
        await call
    except Exception as error:
        return type(error).__name__
    return "ok"


def test_store_timeout_is_transient() -> None:
    assert issubclass(StoreTimeout, Transient)
