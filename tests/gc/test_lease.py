"""One collector at a time, without comparing clocks."""

from __future__ import annotations

from typing import Any

import pytest
from support.servers import S3Place

from s3kv.gc.lease import Lease, LeaseHeld, LeaseLost, LeaseState, acquire
from s3kv.store import Store, open_store
from s3kv.store.memory import MemoryStore


class Nap:
    """Sleep that passes no time but may do something meanwhile."""

    def __init__(self, meanwhile: Any = None) -> None:
        self.slept = 0.0
        self._meanwhile = meanwhile

    async def __call__(self, seconds: float) -> None:
        self.slept += seconds
        if self._meanwhile is not None:
            await self._meanwhile()


async def take(store: Store, holder: str, sleep: Nap | None = None) -> Lease:
    return await acquire(store, "gc", holder, lease_s=60.0, sleep=sleep or Nap())


async def test_a_free_lease_is_taken_at_once_and_raises_the_epoch() -> None:
    store = MemoryStore()
    first = await take(store, "one")
    await first.release()
    nap = Nap()
    second = await take(store, "two", nap)
    assert (first.epoch, second.epoch, nap.slept) == (1, 2, 0.0)


async def test_a_lease_that_is_renewed_is_not_taken() -> None:
    store = MemoryStore()
    first = await take(store, "one")
    with pytest.raises(LeaseHeld, match="one"):
        await take(store, "two", Nap(first.renew))


async def test_a_silent_holder_loses_it_after_the_whole_lease_time_and_finds_out() -> None:
    store = MemoryStore()
    first = await take(store, "one")
    await first.renew(pending_us=5)
    nap = Nap()
    second = await take(store, "two", nap)
    assert nap.slept == pytest.approx(60.0)
    assert second.epoch == first.epoch + 1 and second.state.pending_us == 5
    with pytest.raises(LeaseLost):
        await first.renew()
    await first.release()  # of no effect
    await second.renew()


async def test_a_renewal_whose_answer_was_lost_is_still_ours() -> None:
    store = MemoryStore()
    lease = await take(store, "one")
    original = store.put_if_match

    async def twice(key: str, body: Any, etag: str) -> str:
        await original(key, body, etag)
        return await original(key, body, etag)

    store.put_if_match = twice  # type: ignore[method-assign]
    await lease.renew()
    store.put_if_match = original  # type: ignore[method-assign]
    await lease.renew()


async def test_a_damaged_lease_object_is_replaced_after_watching_it() -> None:
    store = MemoryStore()
    await store.put("lease/gc", b"{not json")
    nap = Nap()
    assert (await take(store, "one", nap)).epoch == 1
    assert nap.slept == pytest.approx(60.0)


@pytest.mark.parametrize("server", ["moto_place", "seaweedfs_place"])
async def test_on_servers(server: str, request: pytest.FixtureRequest) -> None:
    place: S3Place = request.getfixturevalue(server)
    store = open_store(place.settings())
    try:
        first = await take(store, "one")
        await first.renew()
        second = await take(store, "two")
        with pytest.raises(LeaseLost):
            await first.renew()
        await second.release()
    finally:
        await store.close()


def test_state_survives_encoding() -> None:
    state = LeaseState(3, "host:1", 4, 5)
    assert LeaseState.decode(state.encode()) == state
