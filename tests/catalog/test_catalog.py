"""The catalog as its callers see it: several agents, one bucket."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.catalogs import T0, FakeClock, Node, added, block, chain, namespace, state, store_chunk

from s3kv.catalog.catalog import FULL_EVERY, Catalog
from s3kv.catalog.entry import Location
from s3kv.catalog.segments import split_records
from s3kv.errors import ConfigError, Transient
from s3kv.format.keys import chunk_key, log_key, log_prefix, namespace_key
from s3kv.format.limits import MAX_BLOCKS, MAX_SEGMENT_RECORDS
from s3kv.format.records import ChunkDeleted, DeleteReason, Stamp, Touched, hour_of
from s3kv.format.segment import encode_segment
from s3kv.store.memory import MemoryStore


class CountingStore(MemoryStore):
    """Counts calls, and fails those whose key `fails` picks."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.calls: dict[str, int] = {}
        self.fails = lambda key: False

    def _count(self, name: str, key: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.fails(key):
            raise Transient(f"{name} {key} fails")

    async def get_with_etag(self, key, max_bytes):
        self._count("get", key)
        return await super().get_with_etag(key, max_bytes)

    async def get_ranges(self, key, ranges, outs):
        self._count("get", key)
        await super().get_ranges(key, ranges, outs)

    async def put_if_absent(self, key, body):
        self._count("put", key)
        return await super().put_if_absent(key, body)

    async def list(self, prefix, start_after=None):
        self._count("list", prefix)
        async for page in super().list(prefix, start_after):
            yield page


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> CountingStore:
    return CountingStore(clock)


@pytest.fixture
def nodes(store: CountingStore, clock: FakeClock, tmp_path: Path):
    made = []

    def make(agent: int, **changes: object) -> Node:
        own_clock = changes.pop("clock", clock)
        made.append(Node(store, tmp_path / str(agent), agent=agent, clock=own_clock, **changes))
        return made[-1]

    yield make
    for node in made:
        node.kill()


async def names(store: MemoryStore, prefix: str) -> list[str]:
    return [meta.key async for page in store.list(prefix) for meta in page]


async def test_what_one_publishes_the_other_finds(nodes, clock):
    a, b = await nodes(1).start(), await nodes(2).start()
    blocks = chain("a", 3)
    await a.publish([added(namespace(), blocks)])
    assert [place.index for place in a.lookup([*blocks, block("unknown")])] == [0, 1, 2]
    assert b.lookup(blocks) == []
    clock.advance(5)
    assert await b.poll() == 1
    chunk = added(namespace(), blocks).chunk_id
    assert b.lookup(blocks) == [Location(chunk, at, 3) for at in range(3)]
    assert b.lookup([blocks[0], block("other")]) == [Location(chunk, 0, 3)]
    entry = b.chunk(chunk)
    assert entry is not None and entry.blocks == tuple(blocks) and entry.touched_hour == hour_of(T0)


async def test_a_block_of_several_chunks_is_found_in_the_largest_that_is_left(nodes):
    catalog = await nodes(1).start()
    blocks = chain("a", 4)
    small, large = added(namespace(), blocks[:2]), added(namespace(), blocks)
    await catalog.publish([small, large])
    assert {place.chunk_id for place in catalog.lookup(blocks)} == {large.chunk_id}
    await catalog.forget([large.chunk_id], DeleteReason.CORRUPT)
    assert catalog.lookup(blocks) == [Location(small.chunk_id, 0, 2), Location(small.chunk_id, 1, 2)]
    await catalog.forget([small.chunk_id], DeleteReason.CORRUPT)
    assert catalog.lookup(blocks) == []


async def test_case_l4_a_missing_object_is_forgotten_everywhere(nodes, store, clock):
    a, b = await nodes(1).start(), await nodes(2).start()
    blocks = chain("a", 2)
    record = await store_chunk(store, namespace(), blocks)
    await a.publish([record])
    await b.poll()
    await store.delete([chunk_key(namespace().name, record.chunk_id, 0)])
    assert await b.forget([record.chunk_id], DeleteReason.MISSING) == 1
    assert b.lookup(blocks) == []
    clock.advance(5)
    await a.poll()
    assert a.lookup(blocks) == [] and a.is_forgotten(record.chunk_id)
    c = await nodes(3).start()
    assert c.lookup(blocks) == []
    await a.publish([await store_chunk(store, namespace(), blocks)])  # and it heals
    clock.advance(5)
    await b.poll()
    assert len(b.lookup(blocks)) == 2
    assert await b.forget([block("never stored")], DeleteReason.MISSING) == 0


async def test_a_repair_spares_what_was_stored_again_meanwhile(nodes, clock):
    a, b = await nodes(1).start(), await nodes(2).start()
    record = added(namespace(), chain("a", 2))
    await a.publish([record])
    await b.poll()
    clock.advance(10)
    await a.forget([record.chunk_id], DeleteReason.MISSING)
    await a.publish([record])  # b has not heard of it, and finds the old object gone
    await b.forget([record.chunk_id], DeleteReason.MISSING)
    await a.poll()
    await b.poll()
    assert state(a).keys() == state(b).keys() == {record.chunk_id}


async def test_an_add_outdoes_a_deletion_by_a_clock_that_is_ahead(nodes, clock):
    ahead = await nodes(1, clock=lambda: clock() + 200).start()
    behind = await nodes(2, clock=lambda: clock() - 200).start()
    record = added(namespace(), chain("a", 2))
    await ahead.publish([record])
    await ahead.forget([record.chunk_id], DeleteReason.COLLECTED)
    await behind.poll()
    await behind.publish([record])
    await ahead.poll()
    assert len(ahead.lookup(record.blocks)) == len(behind.lookup(record.blocks)) == 2


async def test_poll_costs_one_listing_when_nothing_is_new(nodes, store, clock):
    a, b = await nodes(1).start(), await nodes(2).start()
    for number in range(30):
        await a.publish([added(namespace(), chain(number, 2))])
        clock.advance(1)
    await b.poll()
    store.calls.clear()
    assert await b.poll() == 0
    assert store.calls == {"list": 1}
    await a.publish([added(namespace(), chain("new", 2))])
    store.calls.clear()
    assert await b.poll() == 1
    assert store.calls == {"list": 1, "get": 1}


async def test_a_restart_reads_only_what_is_new(nodes, store, clock):
    a, b = nodes(1), nodes(2)
    await a.start()
    await b.start()
    for number in range(20):
        await a.catalog.publish([added(namespace(), chain(number, 2))])
    await b.catalog.poll()
    await a.catalog.publish([added(namespace(), chain("new", 2))])
    announcing = 2  # format.json and namespace.json are compared
    store.calls.clear()
    await b.restart()
    assert len(state(b.catalog)) == 21 and store.calls["get"] == announcing + 1
    await b.catalog.close()
    store.calls.clear()
    await b.restart()
    assert len(state(b.catalog)) == 21 and store.calls["get"] == announcing


async def test_a_late_segment_of_a_slow_clock_is_found(nodes, store, clock):
    a, b = await nodes(1).start(), await nodes(2).start()
    await a.publish([added(namespace(), chain("now", 1))])
    await b.poll()

    async def put_late(seconds: float, name: str) -> bytes:
        record = added(namespace(), chain(name, 1), time_us=int((clock() - seconds) * 1e6), agent=9)
        body = encode_segment([record], 9, 0, namespace().digest)
        await store.put(log_key(namespace().name, record.stamp.time_us, 9, 0), body)
        return record.blocks[0]

    within = await put_late(50, "within the overlap")
    await b.poll()
    assert len(b.lookup([within])) == 1
    beyond = await put_late(5000, "far beyond it")
    await b.poll()
    assert b.lookup([beyond]) == []
    for _ in range(FULL_EVERY):
        await b.poll()
    assert len(b.lookup([beyond])) == 1
    await b.compact(force=True)
    c = await nodes(3).start()  # from the snapshot
    assert len(c.lookup([beyond])) == len(c.lookup([within])) == 1


async def test_a_slow_agent_names_its_segments_after_what_it_has_read(nodes, store, clock):
    fast = await nodes(1).start()
    slow = await nodes(2, clock=lambda: clock() - 4000).start()
    await fast.publish([added(namespace(), chain("fast", 1))])
    assert await slow.poll() == 1
    await slow.publish([added(namespace(), chain("slow", 1))])
    listed = await names(store, log_prefix(namespace().name))
    assert [key.split("-")[1] for key in listed] == ["00000001", "00000002"]
    assert await fast.poll() == 1


async def test_a_name_far_in_the_future_waits_for_its_time(nodes, clock):
    mad = await nodes(1, clock=lambda: clock() + 10_000).start()
    sane, other = await nodes(2).start(), await nodes(3).start()
    await mad.publish([added(namespace(), chain("future", 1))])
    await sane.poll()
    assert sane.lookup(chain("future", 1)) == []
    await sane.publish([added(namespace(), chain("now", 1))])
    await other.poll()  # whose cursor the future name has not moved
    assert len(other.lookup(chain("now", 1))) == 1
    assert other.stats()["segments_deferred"] > 0
    clock.advance(10_000)
    for _ in range(FULL_EVERY):
        await sane.poll()
    assert len(sane.lookup(chain("future", 1))) == 1


async def test_garbled_and_foreign_segments_are_counted_and_skipped(nodes, store, clock):
    a = await nodes(1).start()
    spec = namespace()
    now = int(T0 * 1e6)
    good = added(spec, chain("good", 1), time_us=now, agent=7)
    forged = dataclasses.replace(good, chunk_id=block("forged"))
    future = ChunkDeleted(good.chunk_id, Stamp(now + 10**10, 7))
    whole = encode_segment([good, forged, future], 7, 0, spec.digest)
    await store.put(log_key(spec.name, now, 7, 0), whole)
    await store.put(log_key(spec.name, now, 7, 1), whole[:-1])
    await store.put(log_key(spec.name, now, 7, 2), encode_segment([good], 7, 2, namespace("other").digest))
    await store.put(log_prefix(spec.name) + "hello world", b"?")
    assert await a.poll() == 1
    assert state(a).keys() == {good.chunk_id}
    stats = a.stats()
    assert (stats["segments_bad"], stats["segments_read"], stats["records_rejected"]) == (2, 1, 2)
    store.calls.clear()
    await a.poll()
    assert store.calls == {"list": 1}


async def test_a_segment_that_cannot_be_fetched_is_read_later(nodes, store, clock):
    a, b = await nodes(1).start(), await nodes(2).start()
    await a.publish([added(namespace(), chain("first", 1))])
    key = (await names(store, log_prefix(namespace().name)))[0]
    store.fails = lambda asked: asked == key
    for number in range(5):  # the cursor must not leave the failed one behind
        clock.advance(100)
        await a.publish([added(namespace(), chain(number, 1))])
        assert await b.poll() == 1
    assert b.lookup(chain("first", 1)) == []
    store.fails = lambda asked: False
    assert await b.poll() == 1
    assert len(b.lookup(chain("first", 1))) == 1


async def test_catching_up_reads_all_that_is_listed_or_raises(nodes, store, clock):
    a, b = await nodes(1).start(), await nodes(2).start()
    await a.publish([added(namespace(), chain("now", 1))])
    await b.poll()
    late = added(namespace(), chain("late", 1), time_us=int((clock() - 5000) * 1e6), agent=9)
    key = log_key(namespace().name, late.stamp.time_us, 9, 0)
    await store.put(key, encode_segment([late], 9, 0, namespace().digest))
    assert await b.poll() == 0  # a put that took an hour and more
    store.fails = lambda asked: asked == key
    with pytest.raises(Transient):
        await b.catch_up()
    store.fails = lambda asked: False
    await b.catch_up()
    assert len(b.lookup(late.blocks)) == 1


async def test_what_is_published_while_the_catalog_opens_is_known_at_once(nodes, store, monkeypatch):
    """An agent stores its first chunks as soon as it may; the listing that opens the catalog is just over then."""
    catalog = nodes(1).catalog
    listing, waiting = store.list, [chain("early", 1)]

    async def publishing(prefix, start_after=None):
        async for page in listing(prefix, start_after):
            yield page
        if prefix == log_prefix(namespace().name) and waiting:
            await catalog.publish([added(namespace(), waiting.pop())])

    monkeypatch.setattr(store, "list", publishing)
    await catalog.open()
    assert len(catalog.lookup(chain("early", 1))) == 1


async def test_an_outage_at_the_start_is_an_error_that_passes(nodes, store):
    a = nodes(1)
    store.fails = lambda key: key.startswith("ns/")
    with pytest.raises(Transient):
        await a.start()
    assert a.catalog.lookup(chain("a", 1)) == []
    store.fails = lambda key: False
    await a.start()
    await a.catalog.publish([added(namespace(), chain("a", 1))])
    assert len(a.catalog.lookup(chain("a", 1))) == 1


async def test_touches_are_coarse_and_batched(nodes, store, clock):
    a, b = await nodes(1).start(), await nodes(2).start()
    records = [added(namespace(), chain(number, 1)) for number in range(50)]
    await a.publish(records)
    await b.poll()
    ids = [record.chunk_id for record in records]
    for _ in range(100):
        b.touch(ids)
    assert b.stats()["touches"] == 0  # added this hour: known to be in use
    clock.advance(7 * 3600)
    store.calls.clear()
    for _ in range(100):
        b.touch(ids)
    await b.flush_touches()
    assert store.calls == {"put": 1}
    b.touch(ids)
    assert b.stats()["touches"] == 0
    await a.poll()
    assert {entry.touched_hour for entry in a.iter_chunks()} == {hour_of(clock())}


async def test_touches_go_out_with_a_poll(nodes, store, clock):
    a = await nodes(1).start()
    record = added(namespace(), chain("a", 1))
    await a.publish([record])
    clock.advance(7 * 3600)
    a.touch([record.chunk_id])
    await a.poll()
    clock.advance(100)
    await a.poll()
    assert a.stats()["touches"] == 0
    entry = a.chunk(record.chunk_id)
    assert entry is not None and entry.touched_hour == hour_of(T0 + 7 * 3600)


async def test_ten_agents_on_one_bucket(nodes, clock):
    catalogs = [await nodes(agent, compact_after_segments=16).start() for agent in range(1, 11)]
    for turn in range(12):
        for agent, catalog in enumerate(catalogs):
            await catalog.publish([added(namespace(), chain((agent, turn), 2))])
            clock.advance(0.5)
        if turn % 3 == 2:
            for catalog in catalogs:
                await catalog.poll()
        if turn == 6:
            for catalog in catalogs[:4]:
                await catalog.compact(force=True)
    for catalog in catalogs:
        await catalog.poll()
    states = [state(catalog) for catalog in catalogs]
    assert len(states[0]) == 120 and all(each == states[0] for each in states)
    assert state(await nodes(99).start()) == states[0]


async def test_another_buckets_index_is_thrown_away(clock, tmp_path):
    first, second = MemoryStore(clock=clock), MemoryStore(clock=clock)
    node = Node(first, tmp_path, clock=clock)
    await node.start()
    await node.catalog.publish([added(namespace(), chain("first", 1))])
    await node.catalog.close()
    clock.advance(1)
    node.store = second
    await node.restart()
    assert state(node.catalog) == {}
    node.kill()


async def test_a_namespace_that_is_another_one_is_refused(store, tmp_path, clock):
    await store.put(namespace_key(namespace().name), namespace("other").to_json())
    with pytest.raises(ConfigError, match=r"store\.url"):
        await Node(store, tmp_path, clock=clock).start()


async def test_two_writers_of_one_index_are_refused(store, tmp_path, clock):
    node = Node(store, tmp_path, clock=clock)
    await node.start()
    with pytest.raises(ConfigError, match=r"catalog\.index_dir"):
        await Node(store, tmp_path, agent=2, clock=clock).start()
    node.kill()


async def test_publishing_works_without_an_index(store, tmp_path, clock):
    node = Node(store, tmp_path, clock=clock)
    record = added(namespace(), chain("a", 1))
    await node.catalog.publish([record])
    assert node.catalog.lookup(record.blocks) == [] and node.catalog.chunk(record.chunk_id) is None
    await node.start()
    assert len(node.catalog.lookup(record.blocks)) == 1
    node.kill()


def test_records_are_split_by_number_and_by_bytes() -> None:
    touches = [Touched(block(0), 1)] * (MAX_SEGMENT_RECORDS + 1)
    assert [len(part) for part in split_records(touches)] == [MAX_SEGMENT_RECORDS, 1]
    large = added(namespace(), chain("large", MAX_BLOCKS))
    parts = list(split_records([large] * 600))
    assert sum(map(len, parts)) == 600 and len(parts) == 3
    for part in parts:
        encode_segment(part, 1, 0, namespace().digest)
    assert list(split_records([])) == []


def test_the_catalog_is_what_others_call() -> None:
    """The names that other rooms rely on."""
    for name in ("open", "poll", "lookup", "chunk", "publish", "forget", "touch", "iter_chunks", "compact", "rebuild"):
        assert callable(getattr(Catalog, name))
