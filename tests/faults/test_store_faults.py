"""The agent's core over a store that fails in every way, in virtual time: no wrong byte, and no lasting harm."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.virtual_agent import VirtualAgent, in_virtual_time

from s3kv.store.faults import Fault, FaultPlan

RATE = 0.4


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("seed", [0, 1])
def test_every_kind_of_fault_harms_nobody_and_passes(tmp_path: Path, fault: Fault, seed: int) -> None:
    """Saves and loads under the fault, then without it: every byte is checked, and the hit rate is what it was."""

    async def work(agent: VirtualAgent) -> None:
        chains = [agent.chain(number, 6) for number in range(8)]
        agent.plan.rates = {fault: RATE}
        for chain in chains:
            agent.save(chain)
            await agent.load(chain, wait_s=2.0)
            await asyncio.sleep(1.0)
        agent.forget()
        for chain in chains:
            await agent.load(chain, wait_s=2.0)
        agent.plan.rates = {}
        await _recovers(agent, chains)
        assert agent.store.breaker_state == "closed"

    in_virtual_time(tmp_path, work, plan=FaultPlan(seed), seed=seed)


async def _recovers(agent: VirtualAgent, chains: list[list[bytes]]) -> None:
    """Within minutes, without a restart: what is missing in the bucket is saved again, and then all of it is loaded."""
    await agent.opened()
    await asyncio.sleep(130.0)
    await agent.quiet()
    agent.forget()
    for chain in chains:
        await agent.load(chain)
        agent.save(chain)
        await agent.stored(chain)
    await agent.quiet()
    agent.forget()
    for chain in chains:
        assert await agent.load(chain) == len(chain)
    await agent.quiet()
    agent.check_at_rest()


def test_case_l3_fifty_seconds_of_stalls_open_the_breaker_which_closes_by_itself(tmp_path: Path) -> None:
    """Only loads run, with the default deadlines: calls that a fetch gave up on must count as well."""

    async def work(agent: VirtualAgent) -> None:
        chains = [agent.chain(number, 4) for number in range(40)]
        for chain in chains:
            agent.save(chain)
            await agent.stored(chain)
        agent.forget()
        agent.plan.rates = {Fault.STALL: 1.0}
        states, waits = set(), []
        began = agent.now()
        while agent.now() < began + 50.0:
            asked = agent.now()
            for chain in chains:
                assert await agent.load(chain, wait_s=0.01) == 0
            waits.append((agent.now() - asked) / len(chains))
            states.add(agent.store.breaker_state)
            await asyncio.sleep(0.5)
        assert "open" in states
        assert max(waits) <= 0.01 + 1e-6, "a match waited beyond its budget"
        agent.plan.rates = {}
        await asyncio.sleep(agent.settings.fetch.deadline_s + agent.settings.store.breaker_reset_s + 1.0)
        for chain in chains:
            assert await agent.load(chain) == len(chain)
        assert agent.store.breaker_state == "closed"
        await agent.quiet()
        agent.check_at_rest()

    in_virtual_time(tmp_path, work)


@pytest.mark.parametrize("fault", [Fault.ERROR_BEFORE, Fault.DENIED, Fault.TIMEOUT])
def test_case_l3_the_breaker_counts_http_errors_and_refused_credentials(tmp_path: Path, fault: Fault) -> None:
    async def work(agent: VirtualAgent) -> None:
        chain = agent.chain(1, 4)
        agent.save(chain)
        await agent.stored(chain)
        agent.forget()
        agent.plan.rates = {fault: 1.0}
        for _ in range(20):
            assert await agent.load(chain) == 0
        assert agent.store.breaker_state == "open"
        calls = sum(agent.plan.counts.values())
        assert await agent.load(chain) == 0
        assert sum(agent.plan.counts.values()) == calls, "an open breaker sends nothing"
        agent.plan.rates = {}
        await asyncio.sleep(agent.settings.store.breaker_reset_s)
        assert await agent.load(chain) == 4
        assert agent.store.breaker_state == "closed"

    in_virtual_time(tmp_path, work)


def test_case_24_what_never_answers_holds_up_nobody_else(tmp_path: Path) -> None:
    """One object's GETs stall for ever; blocks of others go on being loaded and saved meanwhile."""

    async def work(agent: VirtualAgent) -> None:
        stuck, fine = agent.chain(1, 4), [agent.chain(number, 4) for number in range(2, 12)]
        for chain in (stuck, *fine):
            agent.save(chain)
            await agent.stored(chain)
        agent.forget()
        agent.plan.expect("get", Fault.STALL, Fault.STALL)
        asked = agent.now()
        assert await agent.load(stuck, wait_s=0.05) == 0
        assert agent.now() - asked <= 0.05 + 1e-6
        for chain in fine:
            assert await agent.load(chain, wait_s=0.05) == 4
        assert agent.now() - asked < agent.settings.fetch.deadline_s
        new = agent.chain(20, 4)
        agent.save(new)
        await agent.stored(new, seconds=5.0)
        await asyncio.sleep(agent.settings.fetch.deadline_s)
        assert await agent.load(stuck) == 4
        await agent.quiet()
        agent.check_at_rest()

    in_virtual_time(tmp_path, work)


def test_case_28_every_put_fails_then_it_recovers(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        await agent.opened()
        agent.plan.rates = {Fault.ERROR_BEFORE: 1.0}
        chains = [agent.chain(number, 4) for number in range(10)]
        for chain in chains:
            assert agent.save(chain) == 4, "a save is never refused because the store is down"
            await asyncio.sleep(0.5)
        assert agent.total("failed_puts") > 0
        assert agent.total("dropped_blocks") == 0, "an outage shorter than upload.give_up_s loses nothing"
        agent.plan.rates = {}
        for chain in chains:
            await agent.stored(chain)
        assert agent.store.breaker_state == "closed"
        await agent.quiet()
        agent.check_at_rest()

    in_virtual_time(tmp_path, work)


def test_case_28_an_outage_of_minutes_drops_and_counts_and_the_tier_serves_on(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        await agent.opened()
        agent.plan.outage = True
        chain = agent.chain(1, 6)
        agent.save(chain)
        for _ in range(10):
            await asyncio.sleep(60.0)
            assert await agent.load(chain, wait_s=0.3) == 6, "host memory serves without the store"
        assert agent.total("dropped_blocks") == 6
        agent.check_at_rest()
        agent.plan.outage = False
        other = agent.chain(2, 6)
        agent.save(other)
        await agent.stored(other)
        agent.forget()
        assert await agent.load(other) == 6

    in_virtual_time(tmp_path, work)


def test_case_29_a_thousand_failing_gets_through_four_slots_leave_room_for_a_good_one(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        slots = agent.namespace.directory.counters().slots
        assert slots == 4
        chains = [agent.chain(number, 4) for number in range(6)]
        for chain in chains:
            agent.save(chain)
            await agent.stored(chain)
            await agent.quiet()
        agent.forget()
        agent.plan.rates = {Fault.TRUNCATED: 0.5, Fault.TIMEOUT: 0.5}
        for number in range(1000):
            assert await agent.load(chains[number % 6], wait_s=60.0) == 0
        assert agent.total("failed_fetches") >= 1000
        agent.plan.rates = {}
        await asyncio.sleep(agent.settings.store.breaker_reset_s)
        await agent.quiet()
        agent.check_at_rest()
        for chain in chains:
            assert await agent.load(chain) == 4

    in_virtual_time(
        tmp_path, work, tier={"capacity_bytes": 4 * 4096, "dirty_max_fraction": 1.0}, load={"max_pinned_fraction": 1.0}
    )


def test_case_30_twice_as_many_aborted_requests_as_fetches_at_once(tmp_path: Path) -> None:
    """Requests that give up waiting (budget 0, or cancelled in the middle) leave every place for the next."""

    async def work(agent: VirtualAgent) -> None:
        limit = agent.settings.fetch.concurrency
        chains = [agent.chain(number, 2) for number in range(2 * limit + 1)]
        for chain in chains:
            agent.save(chain)
            await agent.stored(chain)
        await agent.quiet()
        agent.forget()
        agent.plan.rates = {Fault.STALL: 1.0}
        waiting = [asyncio.ensure_future(agent.load(chain)) for chain in chains[:-1]]
        await asyncio.sleep(1.0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        agent.plan.rates = {}
        await asyncio.sleep(2 * agent.settings.fetch.deadline_s + agent.settings.store.breaker_reset_s)
        assert await agent.load(chains[-1], wait_s=1.0) == 2
        await agent.quiet()
        agent.check_at_rest()

    in_virtual_time(tmp_path, work)


def test_case_20_the_catalog_says_yes_and_the_store_says_404_500_or_noise(tmp_path: Path) -> None:
    """Nothing is offered, and only what is known to be bad is forgotten: an outage is not damage."""

    async def work(agent: VirtualAgent) -> None:
        chain = agent.chain(1, 4)
        agent.save(chain)
        await agent.stored(chain)
        agent.forget()
        for fault in (Fault.ERROR_BEFORE, Fault.TIMEOUT, Fault.DENIED, Fault.TRUNCATED):
            agent.plan.rates = {fault: 1.0}
            assert await agent.load(chain) == 0
            agent.plan.rates = {}
            await asyncio.sleep(agent.settings.store.breaker_reset_s)
        assert len(agent.namespace.catalog.lookup(chain)) == 4
        assert agent.total("repairs") == 0
        agent.plan.rates = {Fault.WRONG_BYTES: 1.0}
        assert await agent.load(chain) == 0
        assert agent.total("repairs") == 1
        assert agent.namespace.catalog.lookup(chain) == []

    in_virtual_time(tmp_path, work)


def test_a_prefetch_of_what_cannot_be_had_does_not_spin(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        chain = agent.chain(1, 4)
        agent.save(chain)
        await agent.stored(chain)
        agent.forget()
        agent.plan.outage = True
        failed = agent.total("failed_fetches")
        assert await agent.namespace.prefetch(chain, 60.0) == (0, 4)
        assert agent.total("failed_fetches") - failed <= 60.0 / 0.1 + 2

    in_virtual_time(tmp_path, work)


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.ERROR_BEFORE])
def test_a_drain_ends_by_its_deadline_and_says_what_was_not_stored(tmp_path: Path, fault: Fault) -> None:
    async def work(agent: VirtualAgent) -> None:
        first, second = agent.chain(1, 4), agent.chain(2, 3)
        agent.save(first)
        await agent.stored(first)
        await agent.load(first)  # leaves a touch to be published
        await asyncio.sleep(0)
        agent.plan.rates = {fault: 1.0}
        agent.save(second)
        began = agent.now()
        chunks, unsaved = await agent.node.drain(7.0)
        assert agent.now() - began <= 7.0 + 1e-6
        assert (chunks, unsaved) == (0, 3)

    in_virtual_time(tmp_path, work)


def test_a_drain_counts_what_was_given_up_meanwhile(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        await agent.opened()
        agent.plan.outage = True
        agent.save(agent.chain(1, 5))
        assert await agent.node.drain(60.0) == (0, 5)
        agent.plan.outage = False
        agent.save(agent.chain(2, 5))
        assert await agent.node.drain(60.0) == (1, 0)

    in_virtual_time(tmp_path, work, upload={"give_up_s": 3.0})


def test_a_first_match_waits_for_catalog_and_blocks_together_no_longer_than_its_budget(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        chain = agent.chain(1, 4)
        agent.plan.rates = {Fault.LATENCY: 1.0}
        asked = agent.now()
        await agent.load(chain, wait_s=0.5)
        assert agent.now() - asked <= 0.5 + 1e-6

    in_virtual_time(tmp_path, work, plan=FaultPlan(latency_s=0.4))


class Panic(BaseException):
    """As a library written in Rust raises it: no Exception."""


def test_a_panic_in_a_library_is_a_failed_try_and_ends_no_background_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(agent: VirtualAgent) -> None:
        real = {name: getattr(agent.memory, name) for name in ("get_ranges", "put_if_absent", "list")}

        def panic(*_: object, **__: object) -> None:
            raise Panic("called `Result::unwrap()` on an `Err` value")

        chain = agent.chain(1, 4)
        for name in real:
            monkeypatch.setattr(agent.memory, name, panic)
        agent.save(chain)
        await asyncio.sleep(30.0)
        agent.forget()
        assert await agent.load(chain, wait_s=1.0) == 0
        monkeypatch.undo()
        await asyncio.sleep(30.0)
        agent.save(chain)
        await agent.stored(chain)
        agent.forget()
        monkeypatch.setattr(agent.memory, "get_ranges", panic)
        assert await agent.load(chain) == 0
        monkeypatch.undo()
        assert await agent.load(chain) == 4
        await agent.quiet()
        agent.check_at_rest()

    in_virtual_time(tmp_path, work)


def test_a_panic_of_the_probe_leaves_the_place_for_another_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(agent: VirtualAgent) -> None:
        chain = agent.chain(1, 4)
        agent.save(chain)
        await agent.stored(chain)
        agent.forget()
        agent.plan.outage = True
        while agent.store.breaker_state != "open":
            assert await agent.load(chain) == 0
        agent.plan.outage = False

        def panic(*_: object, **__: object) -> None:
            raise Panic

        for name in ("get_ranges", "list"):
            monkeypatch.setattr(agent.memory, name, panic)
        await asyncio.sleep(agent.settings.store.breaker_reset_s)
        assert await agent.load(chain) == 0
        monkeypatch.undo()
        await asyncio.sleep(agent.settings.store.breaker_reset_s)
        assert await agent.load(chain) == 4

    in_virtual_time(tmp_path, work)
