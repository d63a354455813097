"""The local index: crashes, damage, full disks, readers beside the writer."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.catalogs import T0, FakeClock, Node, added, block, chain, namespace, state

from s3kv.catalog.catalog import RESTART_PAUSE_S
from s3kv.catalog.entry import ChunkEntry, Tombstone, pack, unpack
from s3kv.catalog.faults import IndexUnwritable
from s3kv.catalog.folder import read_marker
from s3kv.catalog.index import Index
from s3kv.catalog.names import Mark
from s3kv.errors import ConfigError, CorruptData, Transient
from s3kv.format.records import ChunkDeleted, DeleteReason, Stamp
from s3kv.store.memory import MemoryStore

MAP = 1 << 26


def opened(folder: Path, identity: str = "this bucket", boot: str = "boot 1") -> Index:
    return Index.open(folder, identity, map_bytes=MAP, boot=boot)


def fill(index: Index, number: int) -> None:
    records = [added(namespace(), chain((number, at), 3), time_us=number) for at in range(5)]
    index.apply([(record, 0) for record in records], log={number.to_bytes(16, "big"): Mark.APPLIED}, cursor_us=number)


def check(index: Index) -> None:
    """The tables agree with each other, and the counts with the tables."""
    entries = [unpack(value) for _, value in index.packed(b"", 1 << 20)]
    stored = [entry for entry in entries if isinstance(entry, ChunkEntry)]
    counts = index.counts()
    assert (counts.chunks, counts.tombstones) == (len(stored), len(entries) - len(stored))
    assert counts.bytes == sum(entry.size for entry in stored)
    assert counts.blocks == sum(len(entry.blocks) for entry in stored)
    for entry in stored:
        for at, name in enumerate(entry.blocks):
            assert (entry.chunk_id, at) in [place[:2] for place in index.locations(name)]


def test_entries_pack_and_unpack():
    record = added(namespace(groups=3), chain("a", 5), parent=block("p"), start=7, time_us=9, agent=4)
    for entry in (ChunkEntry(record, 12), Tombstone(ChunkDeleted(block("x"), Stamp(5, 6), DeleteReason.MISSING), 3)):
        assert unpack(pack(entry)) == entry
        with pytest.raises(CorruptData):
            unpack(pack(entry)[:-1])


@pytest.mark.parametrize(
    ("identity", "boot", "clean", "kept"),
    [
        ("this bucket", "boot 1", False, True),  # the process died
        ("this bucket", "boot 2", False, False),  # the machine died: pages may be torn
        ("this bucket", "boot 2", True, True),
        ("another bucket", "boot 1", True, False),
        ("this bucket", "", False, False),  # a kernel that does not say which boot this is
    ],
)
def test_when_an_index_is_kept(tmp_path, identity, boot, clean, kept):
    index = opened(tmp_path)
    fill(index, 1)
    index.set_synced(T0)
    index.close(clean=clean)
    again = opened(tmp_path, identity, boot)
    assert again.is_new is not kept
    assert again.counts().chunks == (5 if kept else 0)
    again.close()


def test_damaged_files_are_thrown_away(tmp_path):
    for damage in (b"", b"\xff" * 8192, b"not lmdb"):
        index = opened(tmp_path)
        fill(index, 1)
        index.close()
        (tmp_path / "data.mdb").write_bytes(damage)
        again = opened(tmp_path)
        assert again.counts().chunks == 0
        fill(again, 2)
        check(again)
        again.destroy()
    (tmp_path / "marker.json").write_text("[]")
    assert read_marker(tmp_path) is None


def test_what_is_no_hash_is_not_there(tmp_path):
    index = opened(tmp_path)
    fill(index, 1)
    for key in (b"", b"short", b"x" * 17, b"x" * 5000):
        assert index.lookup([key]) == [] and index.get(key) is None
        assert len(index.lookup([chain((1, 0), 3)[0], key])) == 1
    index.close()


def test_unreadable_segments_are_tried_again_after_a_restart(tmp_path):
    index = opened(tmp_path)
    bad, good = bytes(15) + b"b", bytes(15) + b"g"
    index.apply((), log={bad: Mark.BAD, good: Mark.APPLIED})
    index.close()
    again = opened(tmp_path)
    assert again.marks("log", [bad, good]) == [Mark.NONE, Mark.APPLIED]
    again.close()


def test_a_load_that_did_not_end_is_thrown_away(tmp_path):
    index = opened(tmp_path)
    index.set_flag("loading", b"1")
    fill(index, 1)
    index.close()
    again = opened(tmp_path)
    assert again.counts().chunks == 0
    again.close()


def test_a_full_map_keeps_the_last_whole_transaction(tmp_path):
    index = Index.open(tmp_path, "x", map_bytes=1 << 18, boot="b")
    with pytest.raises(IndexUnwritable):
        for number in range(1, 1000):
            fill(index, number)
    check(index)
    assert index.counts().chunks == 5 * index.cursor_us > 0
    assert len(index.lookup(chain((1, 0), 3))) == 3
    index.close()


def test_a_full_disk_keeps_the_last_whole_transaction(tmp_path):
    """The file-size limit of a process stands in for a full disk: writes fail in the same place."""
    code = (
        "import sys, resource; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "from test_index import *\n"
        "index = opened(Path(sys.argv[1])); fill(index, 1)\n"
        "size = (Path(sys.argv[1]) / 'data.mdb').stat().st_size\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8192, size + 8192))\n"
        "try:\n"
        "    for number in range(2, 1000): fill(index, number)\n"
        "except IndexUnwritable: check(index); print(index.counts().chunks, index.cursor_us)\n"
    )
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(here.parent), str(here.parent.parent)],
        capture_output=True,
        text=True,
        check=True,
    )
    chunks, cursor = map(int, done.stdout.split())
    assert chunks == 5 * cursor
    again = Index.open(tmp_path, "this bucket", map_bytes=MAP, boot="boot 1")
    assert again.counts().chunks == chunks
    again.close()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 8192


def test_killed_while_it_writes_the_index_is_that_of_a_whole_transaction(tmp_path):
    """Real processes, SIGKILL at random moments: what is marked is there, and the tables agree."""
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "from test_index import *\n"
        "index = opened(Path(sys.argv[1])); first = index.cursor_us + 1\n"
        "print('started', flush=True)\n"
        "for number in range(first, first + 100000):\n"
        "    fill(index, number)\n"
        "    if number % 50 == 0: print(number, flush=True)\n"
    )
    here = Path(__file__)
    rng = random.Random(4)
    reached = 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(here.parent), str(here.parent.parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 8)):
            line = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        rest = [line, *process.stdout.read().split("\n")]
        told = max((int(each) for each in rest if each.strip().isdigit()), default=reached)
        process.stdout.close()
        index = opened(tmp_path)
        cursor = index.cursor_us
        assert cursor >= told >= reached
        assert index.counts().chunks == 5 * cursor
        names = [number.to_bytes(16, "big") for number in range(1, cursor + 2)]
        assert index.marks("log", names) == [Mark.APPLIED] * cursor + [Mark.NONE]
        check(index)
        index.close(clean=False)
        reached = cursor
    assert reached > 0


def test_another_process_reads_while_this_one_writes(tmp_path):
    with pytest.raises(ConfigError, match=r"catalog\.index_dir"):
        Index.open_readonly(tmp_path)
    index = Index.open(tmp_path, "x", map_bytes=MAP)
    fill(index, 1)
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]\n"
        "from test_index import *\n"
        "index = Index.open_readonly(Path(sys.argv[1]))\n"
        "print(len(index.lookup(chain((1, 0), 3))), flush=True); sys.stdin.readline()\n"
        "print(len(index.lookup(chain((2, 0), 3))), flush=True)\n"
    )
    here = Path(__file__)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(here.parent), str(here.parent.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "3\n"
    fill(index, 2)
    assert process.communicate("\n")[0] == "3\n"
    index.close()


async def test_a_full_index_degrades_and_recovers(tmp_path):
    """Lookups go on; what is published is durable; a repair hides its chunk; nothing raises; it heals by itself."""
    clock, store = FakeClock(), MemoryStore()
    a = Node(store, tmp_path / "a", agent=1, clock=clock)
    b = Node(store, tmp_path / "b", agent=2, clock=clock, map_bytes=1 << 18)
    await a.start()
    await b.start()
    records = [added(namespace(), chain(number, 20)) for number in range(400)]
    await b.catalog.publish(records[:10])
    for start in range(10, 400, 10):
        await a.catalog.publish(records[start : start + 10])
        clock.advance(1)
        await b.catalog.poll()
    stats = b.catalog.stats()
    assert stats["index_unwritable"] > 0 and not stats["writable"]
    assert len(b.catalog.lookup(chain(0, 20))) == 20
    await b.catalog.forget([records[0].chunk_id], DeleteReason.MISSING)
    assert b.catalog.lookup(chain(0, 20)) == []
    assert await b.catalog.poll() == 0
    b.settings = Node(store, tmp_path / "c", agent=3, clock=clock).settings  # somebody made room
    await b.restart()
    await a.catalog.poll()
    assert state(b.catalog) == state(a.catalog) and len(state(a.catalog)) == 399
    a.kill()
    b.kill()


async def test_a_full_index_is_not_read_for_at_every_poll(tmp_path):
    """What cannot be kept would be fetched again each time."""
    clock, store = FakeClock(), MemoryStore()
    a = Node(store, tmp_path / "a", agent=1, clock=clock)
    b = Node(store, tmp_path / "b", agent=2, clock=clock, map_bytes=1 << 18)
    await a.start()
    await b.start()
    await a.catalog.publish([added(namespace(), chain(number, 20)) for number in range(400)])
    reads = []

    async def counted(key, max_bytes, get=store.get):
        reads.append(key)
        return await get(key, max_bytes)

    store.get = counted
    for _ in range(29):
        await b.catalog.poll()
        clock.advance(1)
        with pytest.raises(Transient):  # it has not read what is listed
            await b.catalog.catch_up()
    assert reads and len(reads) == len(set(reads))
    clock.advance(RESTART_PAUSE_S)
    await b.catalog.poll()
    assert len(reads) == 2 * len(set(reads))
    a.kill()
    b.kill()


async def test_a_damaged_index_is_made_again_while_serving(tmp_path):
    clock, store = FakeClock(), MemoryStore()
    node = Node(store, tmp_path, clock=clock)
    await node.start()
    record = added(namespace(), chain("a", 3))
    await node.catalog.publish([record])
    index = node.catalog._index
    assert index is not None
    with index._env.begin(write=True) as txn:
        txn.put(record.chunk_id, b"rubbish", db=index.tables["chunks"])
    assert node.catalog.chunk(record.chunk_id) is None
    await node.catalog.poll()
    assert node.catalog.chunk(record.chunk_id) is not None
    assert node.catalog.stats()["index_damaged"] == 1
    node.kill()


async def test_a_killed_catalog_leaves_nothing_locked(tmp_path):
    """Dropped without close: the lock and the environment go with the object."""
    store, clock = MemoryStore(), FakeClock()
    node = Node(store, tmp_path, clock=clock)
    await node.start()
    await node.catalog.publish([added(namespace(), chain("a", 3))])
    node.kill()
    await node.start()
    assert len(state(node.catalog)) == 1
    node.kill()
    await asyncio.sleep(0)
