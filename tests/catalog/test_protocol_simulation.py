"""Some hundred schedules of the simulated protocol; `benchmarks/simulate_protocol.py` runs a hundred thousand."""

from __future__ import annotations

from collections import Counter

import pytest
from support.protocol_sim import simulate
from support.virtual_loop import run_seeded


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_no_schedule_breaks_the_protocol(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + 50):
        try:
            counts += simulate(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    for happened in ("deaths", "freezes", "lost answers", "chunks read", "objects deleted", "compactions"):
        assert counts[happened] > 0


def test_a_schedule_follows_from_its_seed() -> None:
    assert simulate(7) == simulate(7) != simulate(8)


def test_the_loop_ends_what_is_left_and_finds_what_waits_for_ever() -> None:
    import asyncio

    async def waits(loop: object, rng: object) -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="cannot happen"):
        run_seeded(1, waits, 0.0)

    async def sleeps(loop: asyncio.AbstractEventLoop, rng: object) -> float:
        task = asyncio.create_task(asyncio.sleep(1e9))
        await asyncio.sleep(3600)
        assert not task.done()
        return loop.time()

    assert run_seeded(1, sleeps, 100.0) == 3700.0
