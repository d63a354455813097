"""The catalog made again from the chunks' own headers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.catalogs import FakeClock, Node, block, chain, namespace, state, store_chunk

from s3kv.format.keys import chunk_key, chunks_prefix, log_prefix, snap_prefix
from s3kv.format.records import ChunkAdded, DeleteReason, Stamp
from s3kv.store.memory import MemoryStore

SPEC = namespace(groups=2)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock=clock)


async def keys(store: MemoryStore, prefix: str) -> list[str]:
    return [meta.key async for page in store.list(prefix) for meta in page]


async def delete_catalog(store: MemoryStore) -> None:
    await store.delete([*await keys(store, log_prefix(SPEC.name)), *await keys(store, snap_prefix(SPEC.name))])


def without_stamps(records: dict[bytes, object]) -> list[tuple[object, ...]]:
    return [
        (each.chunk_id, each.added.parent, each.added.start_block, each.blocks, each.added.shards, each.added.groups)
        for each in records.values()
    ]


async def filled(node: Node, store: MemoryStore, chains: int = 12) -> list[ChunkAdded]:
    await node.start()
    records = []
    for number in range(chains):
        blocks = chain(number, 6)
        records.append(await store_chunk(store, SPEC, blocks[:4]))
        records.append(await store_chunk(store, SPEC, blocks[4:], parent=blocks[3], start=4))
    await node.catalog.publish(records)
    return records


async def test_a_deleted_catalog_is_rebuilt_as_it_was(store, clock, tmp_path: Path):
    a = Node(store, tmp_path / "a", spec=SPEC, clock=clock)
    await filled(a, store)
    await a.catalog.compact(force=True)
    before = state(a.catalog)
    await delete_catalog(store)
    b = Node(store, tmp_path / "b", spec=SPEC, agent=2, clock=clock)
    await b.start()
    assert state(b.catalog) == {}
    rebuilt = await b.catalog.rebuild()
    assert (rebuilt.found, rebuilt.known, rebuilt.incomplete) == (24, 0, 0)
    assert without_stamps(state(b.catalog)) == without_stamps(before)
    c = Node(store, tmp_path / "c", spec=SPEC, agent=3, clock=clock)
    await c.start()
    assert without_stamps(state(c.catalog)) == without_stamps(before)
    again = await c.catalog.rebuild()
    assert (again.found, again.known) == (0, 24)
    for node in (a, b, c):
        node.kill()


async def test_what_is_not_whole_is_left_out_and_what_is_gone_is_forgotten(store, clock, tmp_path: Path):
    a = Node(store, tmp_path, spec=SPEC, clock=clock)
    records = await filled(a, store, chains=3)
    ids = [record.chunk_id for record in records]
    await store.delete([chunk_key(SPEC.name, ids[0], 1)])  # known, a group is gone
    await store.delete([chunk_key(SPEC.name, ids[1], group) for group in range(2)])  # known, all is gone
    await a.catalog.forget([ids[2]], DeleteReason.COLLECTED)  # awaits its deletion: stays forgotten
    half = await store_chunk(store, SPEC, chain("half", 2))
    await store.delete([chunk_key(SPEC.name, half.chunk_id, 1)])
    torn = await store_chunk(store, SPEC, chain("torn", 2))
    key = chunk_key(SPEC.name, torn.chunk_id, 0)
    await store.put(key, (await store.get(key, 1 << 20))[:-1])
    misplaced = chunk_key(SPEC.name, block("elsewhere"), 0)
    await store.put(misplaced, await store.get(chunk_key(SPEC.name, ids[3], 0), 1 << 20))
    await store.put(chunks_prefix(SPEC.name) + "zz/rubbish", b"?")
    unpublished = await store_chunk(store, SPEC, chain("unpublished", 2))
    rebuilt = await a.catalog.rebuild()
    assert (rebuilt.forgotten, rebuilt.awaiting_deletion, rebuilt.incomplete, rebuilt.found) == (2, 1, 3, 1)
    assert state(a.catalog).keys() == {*ids[3:], unpublished.chunk_id}
    a.kill()


async def test_rebuilding_beside_a_writer_forgets_nothing_that_is_there(store, clock, tmp_path: Path):
    """A page of the listing may be older than a record that is read with it."""
    a = Node(store, tmp_path, spec=SPEC, clock=clock)
    await filled(a, store)
    listing = store.list

    async def old_pages(prefix: str, start_after: str | None = None):
        pages = [page async for page in listing(prefix, start_after)]
        if prefix == chunks_prefix(SPEC.name):
            record = await store_chunk(store, SPEC, chain("new", 2))
            await a.catalog.publish([record])
        for page in pages:
            yield page

    store.list = old_pages
    rebuilt = await a.catalog.rebuild()
    assert (rebuilt.forgotten, rebuilt.known) == (0, 25)
    a.kill()


async def test_long_headers_are_read_whole(store, clock, tmp_path: Path):
    a = Node(store, tmp_path, spec=SPEC, clock=clock)
    record = await store_chunk(store, SPEC, chain("long", 900))
    await a.start()
    assert (await a.catalog.rebuild()).found == 1
    entry = a.catalog.chunk(record.chunk_id)
    assert entry is not None and entry.blocks == record.blocks and entry.stamp > Stamp(0, 0)
    a.kill()
