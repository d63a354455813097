"""A round of collection over several namespaces: what merging keeps, what is asked of the store, what is left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from support.bucket_fill import DAY_S, HOUR_S, Filler, SettableClock, chain, filling, small_namespace

from s3kv.errors import Transient
from s3kv.format.keys import log_prefix, parse_chunk_key
from s3kv.gc.execute import Pace, execute
from s3kv.gc.lease import Heartbeat, LeaseLost, acquire
from s3kv.gc.plan import Policy
from s3kv.gc.round import Round, opened_round
from s3kv.identity import NamespaceSpec
from s3kv.settings import CollectSettings, Settings
from s3kv.store.memory import MemoryStore

FIRST, SECOND = small_namespace("tests/one"), small_namespace("tests/two")
SETTINGS = Settings(collect=CollectSettings(orphan_age_s=HOUR_S))


class CountingStore(MemoryStore):
    def __init__(self, clock: SettableClock) -> None:
        super().__init__(clock=clock)
        self.calls: Counter[str] = Counter()

    async def list(self, prefix: str, start_after: str | None = None):  # type: ignore[no-untyped-def]
        self.calls["list"] += 1
        async for page in super().list(prefix, start_after):
            yield page

    async def put_if_absent(self, key, body):  # type: ignore[no-untyped-def]
        self.calls["put"] += 1
        return await super().put_if_absent(key, body)


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def store(clock: SettableClock) -> CountingStore:
    return CountingStore(clock)


@pytest.fixture
async def fillers(store: CountingStore, clock: SettableClock, tmp_path: Path) -> AsyncIterator[list[Filler]]:
    async with AsyncExitStack() as stack:
        folder = tmp_path / "agent"
        yield [await stack.enter_async_context(filling(store, spec, folder, clock)) for spec in (FIRST, SECOND)]


@asynccontextmanager
async def a_round(store: MemoryStore, clock: SettableClock, *specs: NamespaceSpec) -> AsyncIterator[Round]:
    async with opened_round(store, SETTINGS, specs, clock=clock) as opened:
        yield opened


async def no_beat() -> None:
    """There is nothing to lose here."""


async def chunks_of(store: MemoryStore) -> set[bytes]:
    keys = [parse_chunk_key(meta.key) async for page in store.list("ns/") for meta in page]
    return {key.chunk_id for key in keys if key is not None}


async def carry_out(opened: Round, store: MemoryStore, clock: SettableClock, policy: Policy) -> None:
    async def sleep(seconds: float) -> None:
        clock.now += seconds

    lease = await acquire(store, "gc", "one", lease_s=60.0, sleep=sleep)
    pace = Pace(300.0, 60.0, clock, clock, sleep)
    scans = await opened.scan(now=clock.now, progress=lambda count: None)
    plan = opened.plan(policy, opened.orphans(scans, unnamed=True))
    await execute(plan, opened.places, store, lease, pace)


async def test_a_merge_that_adopts_an_orphan_keeps_it_although_the_scan_called_it_one(
    store: CountingStore, clock: SettableClock, fillers: Sequence[Filler]
) -> None:
    """An earlier merge was killed between its object and its record."""
    hashes = chain(FIRST, "a", 6)
    for start in (0, 2, 4):
        await fillers[0].put_chunk(hashes, start, 2)
    whole = await fillers[0].put_chunk(hashes, 0, 6, publish=False)
    clock.now += DAY_S
    async with a_round(store, clock, FIRST) as opened:
        scans = await opened.scan(now=clock.now, progress=lambda count: None)
        assert [each.chunk_id for each in scans[FIRST.name].orphans] == [whole.chunk_id]
        policy = Policy(clock.now, superseded=True)
        await opened.merge(opened.merges(opened.plan(policy, ())), lambda count: None, no_beat)
        assert opened.orphans(scans, unnamed=True) == []
        await carry_out(opened, store, clock, policy)
    assert await chunks_of(store) == {whole.chunk_id}
    async with a_round(store, clock, FIRST) as opened:
        assert len(opened.catalogs[FIRST.name].lookup(hashes)) == 6


async def test_an_orphan_that_somebody_stores_before_it_goes_is_not_forgotten(
    store: CountingStore, clock: SettableClock, fillers: Sequence[Filler]
) -> None:
    orphan = await fillers[0].put_chunk(chain(FIRST, "a", 2), 0, 2, publish=False)
    clock.now += DAY_S
    async with a_round(store, clock, FIRST) as opened:
        scans = await opened.scan(now=clock.now, progress=lambda count: None)
        plan = opened.plan(Policy(clock.now), opened.orphans(scans, unnamed=True))
        await opened.catalogs[FIRST.name].publish([orphan])

        async def sleep(seconds: float) -> None:
            clock.now += seconds

        lease = await acquire(store, "gc", "one", lease_s=60.0, sleep=sleep)
        outcome = await execute(plan, opened.places, store, lease, Pace(300.0, 60.0, clock, clock, sleep))
        assert (outcome.kept, outcome.chunks) == (1, 0)
        assert opened.catalogs[FIRST.name].chunk(orphan.chunk_id) is not None


async def test_namespaces_are_collected_one_after_another(
    store: CountingStore, clock: SettableClock, fillers: Sequence[Filler]
) -> None:
    """Alternating would cost a segment and a listing of the whole log for each chunk."""
    for number in range(30):
        for filler in fillers:
            clock.now += 7 * HOUR_S
            await filler.put_chunk(chain(filler.spec, f"{number}", 1), 0, 1)
    async with a_round(store, clock, FIRST, SECOND) as opened:
        store.calls.clear()
        await carry_out(opened, store, clock, Policy(clock.now, max_bytes=0))
    assert await chunks_of(store) == set()
    assert store.calls["put"] == 3  # a segment for each namespace, and the lease
    assert store.calls["list"] < 12


async def test_what_is_merged_stays_as_old_as_it_was(
    store: CountingStore, clock: SettableClock, fillers: Sequence[Filler]
) -> None:
    hashes = chain(FIRST, "cold", 4)
    for start in (0, 2):
        await fillers[0].put_chunk(hashes, start, 2)
    cold_hour = int(clock.now // HOUR_S)
    clock.now += 20 * DAY_S
    hot = await fillers[0].put_chunk(chain(FIRST, "hot", 2), 0, 2)
    async with a_round(store, clock, FIRST) as opened:
        merges = opened.merges(opened.plan(Policy(clock.now, superseded=True), ()))
        await opened.merge(merges, lambda count: None, no_beat)
        plan = opened.plan(Policy(clock.now, max_bytes=hot.size, superseded=True), ())
        assert {
            entry.touched_hour for entry in opened.catalogs[FIRST.name].iter_chunks() if len(entry.blocks) == 4
        } == {cold_hour}
    assert hot.chunk_id not in {each.chunk_id for each in plan.items()}
    assert len(plan) == 3


async def test_merging_keeps_the_lease_and_writes_few_segments(
    store: CountingStore, clock: SettableClock, fillers: Sequence[Filler]
) -> None:
    for number in range(20):
        hashes = chain(FIRST, f"{number}", 2)
        for start in (0, 1):
            await fillers[0].put_chunk(hashes, start, 1)
    before = len([meta async for page in store.list(log_prefix(FIRST.name)) for meta in page])

    async def sleep(seconds: float) -> None:
        clock.now += seconds

    lease = await acquire(store, "gc", "one", lease_s=60.0, sleep=sleep)
    epoch = lease.epoch
    beat = Heartbeat(lease, 60.0, clock)

    async def slow() -> None:
        clock.now += 25.0  # each merge takes so long
        await beat()

    async with a_round(store, clock, FIRST) as opened:
        merged = await opened.merge(opened.merges(opened.plan(Policy(clock.now), ())), lambda count: None, slow)
        assert (merged.made, merged.bad) == (20, 0)
    assert lease.state.beat == 20 and lease.epoch == epoch
    after = [meta async for page in store.list(log_prefix(FIRST.name)) for meta in page]
    assert len(after) == before + 1
    await store.put("lease/gc", b"somebody else's")
    clock.now += 25.0
    with pytest.raises(LeaseLost):
        await beat()


@pytest.mark.parametrize("kind", ["snapshot", "segment", "future"])
async def test_while_the_catalog_cannot_be_read_completely_nothing_is_an_orphan(
    store: CountingStore, clock: SettableClock, tmp_path: Path, kind: str
) -> None:
    """Else one damaged object, or one node with a wrong clock, would be the end of a whole cache."""
    ahead_s = DAY_S / 2 if kind == "future" else 0.0
    async with filling(store, FIRST, tmp_path, lambda: clock() + ahead_s) as filler:
        stored = await filler.put_chunk(chain(FIRST, "a", 2), 0, 2)
        log = [meta.key async for page in store.list(log_prefix(FIRST.name)) for meta in page]
        if kind == "snapshot":
            key = (await filler.catalog.compact(force=True)).snapshot
            await store.delete(log)  # as a compaction does a grace period later
        else:
            (key,) = log
    if kind != "future":
        body = bytearray(await store.get(key, 1 << 20))
        body[-1] ^= 1
        await store.put(key, bytes(body))
    clock.now += 2 * HOUR_S
    async with a_round(store, clock, FIRST) as opened:
        scan = (await opened.scan(now=clock.now, progress=lambda count: None))[FIRST.name]
        assert (scan.orphans, scan.unsure, scan.unread) == ([], 1, 1)
        rebuilt = await opened.catalogs[FIRST.name].rebuild()
        assert (rebuilt.found, rebuilt.unreadable) == (1, 0 if kind == "future" else 1)
    async with a_round(store, clock, FIRST) as opened:
        assert opened.catalogs[FIRST.name].chunk(stored.chunk_id) is not None
        scan = (await opened.scan(now=clock.now, progress=lambda count: None))[FIRST.name]
        assert scan.unread == (1 if kind == "future" else 0)  # that one is read when its time has come


async def test_an_orphan_stays_when_the_catalog_can_no_longer_be_read_as_it_goes(
    store: CountingStore, clock: SettableClock, fillers: Sequence[Filler]
) -> None:
    await fillers[0].put_chunk(chain(FIRST, "a", 2), 0, 2, publish=False)
    clock.now += DAY_S
    async with a_round(store, clock, FIRST) as opened:
        scans = await opened.scan(now=clock.now, progress=lambda count: None)
        plan = opened.plan(Policy(clock.now), opened.orphans(scans, unnamed=True))
        assert len(plan) == 1

        async def sleep(seconds: float) -> None:
            clock.now += seconds
            await store.put(f"{log_prefix(FIRST.name)}{1:016x}-{7:08x}-{0:08x}", b"its record may be in here")

        lease = await acquire(store, "gc", "one", lease_s=60.0, sleep=sleep)
        outcome = await execute(plan, opened.places, store, lease, Pace(300.0, 60.0, clock, clock, sleep))
    assert (outcome.kept, outcome.chunks) == (1, 0)
    assert len(await chunks_of(store)) == 1


async def test_a_rebuild_deletes_nothing_of_the_catalog_that_reads_well_at_a_second_look(
    store: CountingStore, clock: SettableClock, fillers: Sequence[Filler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong byte on the way would else cost every last use, and every deletion, that a snapshot remembers."""
    await fillers[0].put_chunk(chain(FIRST, "a", 2), 0, 2)
    key = (await fillers[0].catalog.compact(force=True)).snapshot
    await store.delete([meta.key async for page in store.list(log_prefix(FIRST.name)) for meta in page])
    read, wrong = store.get_ranges, [key]

    async def misread(asked: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
        await read(asked, ranges, outs)
        if asked in wrong:
            outs[-1][-1] ^= 1

    monkeypatch.setattr(store, "get_ranges", misread)
    async with a_round(store, clock, FIRST) as opened:
        assert opened.catalogs[FIRST.name].unread == 1
        wrong.clear()
        with pytest.raises(Transient, match="reads well now"):
            await opened.catalogs[FIRST.name].rebuild()
    async with a_round(store, clock, FIRST) as opened:
        assert opened.catalogs[FIRST.name].unread == 0 and opened.chunks == 1


async def test_a_name_years_ahead_does_not_keep_orphans_for_years(
    store: CountingStore, clock: SettableClock, tmp_path: Path
) -> None:
    async with filling(store, FIRST, tmp_path, lambda: clock() + 3650 * DAY_S) as filler:
        stored = await filler.put_chunk(chain(FIRST, "a", 2), 0, 2)
    async with a_round(store, clock, FIRST) as opened:
        catalog = opened.catalogs[FIRST.name]
        assert catalog.unread == 1
        assert (await catalog.rebuild()).unreadable == 1
    async with a_round(store, clock, FIRST) as opened:
        assert opened.catalogs[FIRST.name].unread == 0
        assert opened.catalogs[FIRST.name].chunk(stored.chunk_id) is not None
