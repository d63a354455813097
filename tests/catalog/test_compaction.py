"""Snapshots: folding, deleting after grace, racing compactors, damage."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.catalogs import FakeClock, Node, added, chain, namespace, state

from s3kv.catalog.compaction import is_due
from s3kv.catalog.sync import Synced
from s3kv.format.keys import log_prefix, snap_prefix
from s3kv.format.records import DeleteReason
from s3kv.settings import StoreSettings
from s3kv.store import open_store
from s3kv.store.memory import MemoryStore

SPEC = namespace()
DAY = 86_400.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
def nodes(store: MemoryStore, clock: FakeClock, tmp_path: Path):
    made: list[Node] = []

    def make(agent: int, **changes: object) -> Node:
        made.append(Node(store, tmp_path / str(agent), agent=agent, clock=clock, **changes))
        return made[-1]

    yield make
    for node in made:
        node.kill()


async def names(store: MemoryStore, prefix: str) -> list[str]:
    return [meta.key async for page in store.list(prefix) for meta in page]


async def publish(node: Node, first: int, count: int, clock: FakeClock) -> None:
    for number in range(first, first + count):
        await node.catalog.publish([added(SPEC, chain(number, 2))])
        clock.advance(1)


async def test_folded_segments_are_deleted_after_grace_and_new_agents_read_the_snapshot(nodes, store, clock):
    a, b = nodes(1), nodes(2)
    await a.start()
    await b.start()
    await publish(a, 0, 10, clock)
    gone = added(SPEC, chain(3, 2)).chunk_id
    await a.catalog.forget([gone], DeleteReason.COLLECTED)
    done = await a.catalog.compact(force=True)
    await publish(b, 50, 1, clock)
    await a.catalog.poll()
    assert done.folded == 11 and done.deleted == 0
    assert len(await names(store, log_prefix(SPEC.name))) == 12
    clock.advance(200)
    assert (await b.catalog.compact()).deleted == 0  # within grace
    clock.advance(200)
    await publish(a, 10, 1, clock)
    await b.catalog.poll()
    assert (await b.catalog.compact()).deleted == 11
    assert len(await names(store, log_prefix(SPEC.name))) == 2
    fresh = nodes(3)
    await fresh.start()
    assert state(fresh.catalog) == state(a.catalog) == state(b.catalog)
    assert len(state(a.catalog)) == 11 and fresh.catalog.is_forgotten(gone)
    assert fresh.catalog.stats()["snapshots_read"] == 1 and b.catalog.stats()["snapshots_read"] == 0


async def test_a_snapshot_replaces_the_one_before(nodes, store, clock):
    a = nodes(1)
    await a.start()
    for turn in range(4):
        await publish(a, turn * 5, 5, clock)
        await a.catalog.compact(force=True)
        clock.advance(400)
    await publish(a, 100, 1, clock)
    await a.catalog.compact()
    assert len(await names(store, snap_prefix(SPEC.name))) == 1
    assert len(await names(store, log_prefix(SPEC.name))) == 1
    assert (await a.catalog.compact(force=True)).folded == 1
    assert (await a.catalog.compact(force=True)).snapshot == ""


async def test_racing_compactors_lose_nothing(nodes, store, clock):
    a, b, c = nodes(1), nodes(2), nodes(3)
    for node in (a, b, c):
        await node.start()
    await publish(a, 0, 5, clock)
    await a.catalog.compact(force=True)
    await publish(b, 5, 5, clock)
    # c stalls between reading and writing, for far longer than grace, while a folds, deletes and folds again.
    put = store.put_if_absent
    late: list[tuple[str, bytes]] = []

    async def stall(key: str, body: object) -> str:
        if "/snap/" in key:
            late.append((key, bytes(body)))
            raise KeyboardInterrupt
        return await put(key, body)

    store.put_if_absent = stall
    with pytest.raises(KeyboardInterrupt):
        await c.catalog.compact(force=True)
    store.put_if_absent = put
    await publish(a, 10, 5, clock)
    for _ in range(3):
        clock.advance(400)
        await publish(b, 20, 1, clock)
        await a.catalog.compact(force=True)
    await store.put(*late[0])
    await b.catalog.poll()
    fresh = nodes(4)
    await fresh.start()
    assert len(state(a.catalog)) == 16
    assert state(fresh.catalog) == state(a.catalog)
    for _ in range(2):
        clock.advance(400)
        await publish(b, 30, 1, clock)
        await fresh.catalog.compact(force=True)
    again = nodes(5)
    await again.start()
    assert len(state(again.catalog)) == 17
    assert late[0][0] not in await names(store, snap_prefix(SPEC.name))


async def test_an_agent_that_was_away_joins_the_snapshot(nodes, store, clock):
    a, b = nodes(1), nodes(2)
    await a.start()
    await b.start()
    await publish(a, 0, 5, clock)
    await b.catalog.poll()
    await b.catalog.publish([added(SPEC, chain("b", 1))])
    await publish(a, 5, 5, clock)
    await a.catalog.compact(force=True)
    clock.advance(400)
    await publish(a, 10, 1, clock)
    await a.catalog.compact()
    clock.advance(3000)
    await b.catalog.poll()
    assert state(b.catalog) == state(a.catalog) and len(state(b.catalog)) == 12


async def test_tombstones_outlive_grace_and_end_with_their_time(nodes, store, clock):
    a = nodes(1)
    await a.start()
    await publish(a, 0, 2, clock)
    gone = added(SPEC, chain(0, 2)).chunk_id
    await a.catalog.forget([gone], DeleteReason.COLLECTED)
    await a.catalog.compact(force=True)
    clock.advance(DAY / 2)
    fresh = nodes(2)
    await fresh.start()
    assert fresh.catalog.is_forgotten(gone)
    clock.advance(DAY)
    await publish(fresh, 10, 1, clock)
    await fresh.catalog.compact(force=True)
    assert not fresh.catalog.is_forgotten(gone) and fresh.catalog.stats()["tombstones"] == 0
    clock.advance(DAY)
    await a.restart()  # away for longer than tombstones are kept: made again
    assert state(a.catalog) == state(fresh.catalog)
    assert not a.catalog.is_forgotten(gone)


async def test_an_agent_that_was_cut_off_for_longer_than_tombstones_are_kept_begins_anew(nodes, store, clock):
    """Else it would bring back, by its next snapshot, what was deleted meanwhile."""
    a, b = nodes(1), nodes(2)
    await a.start()
    await publish(a, 0, 2, clock)
    await b.start()
    gone = added(SPEC, chain(0, 2)).chunk_id
    await a.catalog.forget([gone], DeleteReason.COLLECTED)
    for number in range(2, 6):
        clock.advance(DAY / 2)
        await publish(a, number, 1, clock)
        await a.catalog.compact(force=True)
    assert state(b.catalog).keys() == {gone, added(SPEC, chain(1, 2)).chunk_id}
    await b.catalog.poll()
    assert state(b.catalog) == state(a.catalog) and gone not in state(a.catalog)


async def test_a_damaged_snapshot_is_skipped_and_the_log_read(nodes, store, clock):
    a = nodes(1)
    await a.start()
    await publish(a, 0, 3, clock)
    key = (await a.catalog.compact(force=True)).snapshot
    body = await store.get(key, 1 << 20)
    for damaged in (body[:40], body[:-1], body[:150] + bytes([body[150] ^ 1]) + body[151:]):
        await store.put(key, damaged)
        fresh = Node(store, nodes(7).folder, agent=7, clock=clock)
        await fresh.start()
        assert state(fresh.catalog) == state(a.catalog)
        assert fresh.catalog.stats()["snapshots_bad"] == 1
        await fresh.catalog.poll()
        index = fresh.catalog._index
        assert index is not None
        index.destroy()


async def test_a_catalog_that_somebody_deleted_is_written_again_by_an_agent_that_knows_it(nodes, store, clock):
    a = nodes(1)
    await a.start()
    await publish(a, 0, 3, clock)
    await a.catalog.compact(force=True)
    await store.delete([*await names(store, log_prefix(SPEC.name)), *await names(store, snap_prefix(SPEC.name))])
    await publish(a, 3, 1, clock)
    b = nodes(2)
    await b.start()
    assert len(state(b.catalog)) == 1
    await a.catalog.compact(force=True)
    clock.advance(200)
    await b.catalog.poll()
    assert state(b.catalog) == state(a.catalog) and len(state(b.catalog)) == 4


async def test_a_killed_compactor_changes_nothing(nodes, store, clock):
    a = nodes(1)
    await a.start()
    await publish(a, 0, 3, clock)
    before = state(a.catalog)

    async def die(keys: object) -> list[object]:
        raise KeyboardInterrupt

    await a.catalog.compact(force=True)
    clock.advance(400)
    await publish(a, 0, 1, clock)
    delete, store.delete = store.delete, die
    with pytest.raises(KeyboardInterrupt):
        await a.catalog.compact(force=True)
    store.delete = delete
    await a.restart()
    assert state(a.catalog).keys() == before.keys()
    assert (await a.catalog.compact()).deleted == 3


def test_folding_waits_until_it_pays():
    assert not is_due(Synced(unfolded=9, unfolded_bytes=10**9), 10)
    assert is_due(Synced(unfolded=10, unfolded_bytes=1), 10)
    from s3kv.catalog.snapshots import Snapshot
    from s3kv.format.snapshot import SegmentName
    from s3kv.store import ObjectMeta

    large = [Snapshot(SegmentName(1, 0, 1), ObjectMeta("s", 10**8, "e", 0.0))]
    assert not is_due(Synced(unfolded=10, unfolded_bytes=10**6, snapshots=large), 10)
    assert is_due(Synced(unfolded=10, unfolded_bytes=2 * 10**7, snapshots=large), 10)
    assert is_due(Synced(unfolded=160, unfolded_bytes=10**6, snapshots=large), 10)


async def test_compaction_happens_by_itself(nodes, store, clock):
    a = nodes(1, compact_after_segments=8)
    await a.start()
    for number in range(200):
        await publish(a, number, 1, clock)
        clock.advance(4)
        await a.catalog.poll()
        if a.catalog.wants_compaction():
            await a.catalog.compact()
    assert len(await names(store, log_prefix(SPEC.name))) < 110
    assert 1 <= len(await names(store, snap_prefix(SPEC.name))) <= 8
    fresh = nodes(2)
    await fresh.start()
    assert state(fresh.catalog) == state(a.catalog)


async def test_the_same_over_a_folder(tmp_path, clock):
    """A store with real times, etags and mapped uploads."""
    store = open_store(StoreSettings(url=f"file://{tmp_path / 'bucket'}"))
    a, b = (Node(store, tmp_path / str(agent), agent=agent, clock=clock) for agent in (1, 2))
    await a.start()
    for number in range(5):
        await publish(a, number, 1, clock)
    assert (await a.catalog.compact(force=True)).folded == 5
    await publish(a, 5, 1, clock)
    await b.start()
    assert state(b.catalog) == state(a.catalog) and len(state(a.catalog)) == 6
    assert b.catalog.stats()["segments_read"] == 1
    for node in (a, b):
        await node.catalog.close()
        node.kill()
        await node.start()  # the identity of the bucket is stable
        assert node.catalog.stats()["segments_read"] == node.catalog.stats()["snapshots_read"] == 0
        assert len(state(node.catalog)) == 6
        node.kill()
    await store.close()
