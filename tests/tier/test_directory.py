"""What the directory promises, one promise a test; every test ends with the full check."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from s3kv.identity import ROOT
from s3kv.tier import Committed, Directory, Reserved, State
from s3kv.tier.leases import GONE_REMEMBERED
from s3kv.tier.table import TICKET_LIMIT

MakeDirectory = Callable[..., Directory]


@pytest.fixture
def make() -> Iterator[MakeDirectory]:
    made: list[Directory] = []

    def make(slots: int, parts: tuple[int, ...] = (0,), dirty_max_slots: int = 0) -> Directory:
        made.append(Directory(slots, parts, slot_bytes_all_parts=4096, dirty_max_slots=dirty_max_slots))
        return made[-1]

    yield make
    for directory in made:
        directory.check()


def chain(count: int, name: int = 1) -> list[bytes]:
    return [bytes([name, i]) + bytes(14) for i in range(count)]


def reserve(directory: Directory, hashes: list[bytes], part: int = 0, holder: str = "engine") -> list[Reserved]:
    reserved = directory.reserve(part, ROOT, 0, hashes, holder)
    return [room for room in reserved if room is not None]


def save(directory: Directory, hashes: list[bytes]) -> None:
    for part in directory.parts:
        for room in reserve(directory, hashes, part):
            directory.commit(part, *room)


def offered(directory: Directory, hashes: list[bytes]) -> int:
    """How many blocks a match offers; leaves no lease."""
    found = directory.match(hashes, readers={0: "engine"})
    directory.release(found.lease_id)
    return len(found.slots)


def test_the_longest_resident_prefix_is_offered(make: MakeDirectory) -> None:
    directory = make(8)
    blocks = chain(5)
    save(directory, blocks[:2] + blocks[3:])
    found = directory.match(blocks, readers={0: "engine"})
    assert len(found.slots) == 2
    counters = directory.counters()
    assert (counters.hits, counters.misses, counters.pinned) == (2, 3, 2)
    assert directory.match([blocks[2]], readers={0: "engine"}) == (0, [])


def test_case_21_what_one_shard_lacks_is_not_offered(make: MakeDirectory) -> None:
    directory = make(8, parts=(0, 1, 255))
    blocks = chain(4)
    for part, have in ((0, 4), (1, 2), (255, 3)):
        for room in reserve(directory, blocks, part)[:have]:
            directory.commit(part, *room)
    assert offered(directory, blocks) == 2


def test_case_29_a_thousand_failed_fetches_leave_room_for_a_good_one(make: MakeDirectory) -> None:
    directory = make(4)
    for i in range(1000):
        block = i.to_bytes(16, "big")
        (slot,) = directory.begin_fetch([block], parent=ROOT, start_block=0)
        assert slot is not None
        assert not directory.finish_fetch(slot, ok=False)
        assert directory.state(block) is None
    blocks = chain(4)
    for slot in directory.begin_fetch(blocks, parent=ROOT, start_block=0):
        assert slot is not None and directory.finish_fetch(slot, ok=True)
    assert offered(directory, blocks) == 4
    assert directory.counters().no_room == 0


def test_case_30_aborted_requests_give_everything_back(make: MakeDirectory) -> None:
    directory = make(4)
    blocks = chain(2)
    save(directory, blocks)
    limit = 2
    for i in range(2 * limit):
        found = directory.match(blocks, readers={0: "leader", 1: "worker"}, max_pinned_slots=limit)
        fetched = directory.begin_fetch(chain(2, name=2 + i), parent=ROOT, start_block=0)
        assert directory.release(found.lease_id)  # the abort, before the fetch is done
        assert [directory.finish_fetch(slot, ok=False) for slot in fetched if slot is not None] == [False, False]
    assert directory.counters().pinned == 0
    assert None not in directory.begin_fetch(chain(2, name=99), parent=ROOT, start_block=0)
    assert len(directory.match(blocks, readers={0: "leader"}, max_pinned_slots=limit).slots) == limit


def test_a_lease_lasts_until_its_last_reader_is_done(make: MakeDirectory) -> None:
    directory = make(2)
    save(directory, chain(2))
    found = directory.match(chain(2), readers={0: "rank0", 1: "rank1"})
    assert directory.release(found.lease_id, 0)
    assert not directory.release(found.lease_id, 0)
    assert directory.begin_fetch(chain(1, name=2), parent=ROOT, start_block=0) == [None]
    assert directory.release(found.lease_id, 1)
    assert directory.begin_fetch(chain(1, name=2), parent=ROOT, start_block=0) != [None]
    assert not directory.release(found.lease_id)
    assert not directory.release(12345)


def test_offers_pin_no_more_than_they_may(make: MakeDirectory) -> None:
    directory = make(4)
    save(directory, chain(4))
    first = directory.match(chain(4), readers={0: "engine"}, max_pinned_slots=3)
    again = directory.match(chain(4), readers={0: "engine"}, max_pinned_slots=3)
    assert len(first.slots) == len(again.slots) == 3, "what is pinned already costs nothing more"
    assert directory.counters().pin_limited == 2


def test_the_least_recently_used_goes_first_and_a_shared_prefix_last(make: MakeDirectory) -> None:
    directory = make(6)
    shared = chain(2)
    left, right = shared + chain(2, name=2), shared + chain(2, name=3)
    save(directory, left)
    save(directory, right)
    for used in (left, right):
        offered(directory, used)
    expected = [left[3], left[2], right[3], right[2], shared[1], shared[0]]
    for i, victim in enumerate(expected):
        assert directory.state(victim) is State.RESIDENT
        directory.begin_fetch([bytes([9, i]) + bytes(14)], parent=ROOT, start_block=0)
        assert directory.state(victim) is None
    assert directory.counters().evicted == 6


def test_touching_a_chain_makes_its_head_the_last_to_go(make: MakeDirectory) -> None:
    directory = make(4)
    save(directory, chain(3))  # in the order of arrival the head would go first
    save(directory, chain(1, name=2))
    assert directory.touch_chain(chain(3)[-1]) == 3
    save(directory, chain(2, name=3))
    assert [directory.state(block) for block in chain(3)] == [State.RESIDENT, State.RESIDENT, None]
    assert directory.touch_chain(b"unknown") == 0


def test_a_circle_of_parents_ends(make: MakeDirectory) -> None:
    directory = make(2)
    a, b = chain(2)
    for block, parent in ((a, b), (b, a)):
        (room,) = directory.reserve(0, parent, 7, [block], "engine")
        assert room is not None
        directory.commit(0, *room)
    assert directory.touch_chain(a) == 1


def test_parts_share_slot_and_ticket_and_a_part_is_written_once(make: MakeDirectory) -> None:
    directory = make(4, parts=(0, 1))
    first = reserve(directory, chain(2), 0, "a")
    assert reserve(directory, chain(2), 1, "b") == first
    assert reserve(directory, chain(2), 0, "another engine") == []
    assert directory.commit(0, *first[0]) is Committed.WAITING
    assert reserve(directory, chain(1), 0, "another engine") == [], "it is there already"
    assert directory.commit(1, *first[0]) is Committed.CLEAN
    assert directory.reserve(7, ROOT, 0, chain(2), "a") == [None, None]


def test_an_abandoned_block_waits_for_its_other_writers(make: MakeDirectory) -> None:
    directory = make(1, parts=(0, 1))
    (room,) = reserve(directory, chain(1), 0, "a")
    reserve(directory, chain(1), 1, "b")
    assert directory.abandon(0, *room)
    assert directory.state(chain(1)[0]) is None
    assert reserve(directory, chain(1, name=2)) == [], "b may still be copying into the only slot"
    assert directory.commit(1, *room) is Committed.STALE
    assert reserve(directory, chain(1, name=2)) == [Reserved(room.slot, room.ticket + 1)]


def test_after_a_writer_died_somebody_else_saves_the_block(make: MakeDirectory) -> None:
    directory = make(4)
    (late,) = reserve(directory, chain(1), holder="dying")
    assert reserve(directory, chain(1), holder="other") == []
    directory.quarantine_holder("dying")
    assert reserve(directory, chain(1), holder="other") == [], "it may still be copying"
    assert directory.counters().quarantined == 1
    directory.holder_gone("dying")
    assert directory.counters().quarantined == 0
    (room,) = reserve(directory, chain(1), holder="other")
    assert directory.commit(0, *late) is Committed.STALE, "the same slot, an older ticket"
    assert directory.commit(0, *room) is Committed.CLEAN


def test_a_part_that_never_comes_does_not_hold_its_slot(make: MakeDirectory) -> None:
    directory = make(2, parts=(0, 1))
    for room in reserve(directory, chain(2), 1):
        directory.commit(1, *room)  # part 0 found no room, or was dropped
    assert directory.counters().arriving == 2
    assert len(reserve(directory, chain(2, name=2), 0)) == 2
    assert offered(directory, chain(2)) == 0


def test_a_fetch_takes_over_a_block_of_which_only_parts_came(make: MakeDirectory) -> None:
    directory = make(2, parts=(0, 1))
    (room,) = reserve(directory, chain(1), 1)
    assert directory.begin_fetch(chain(1), parent=ROOT, start_block=0) == [None], "it is being written"
    directory.commit(1, *room)
    (slot,) = directory.begin_fetch(chain(1), parent=ROOT, start_block=0)
    assert slot is not None
    assert directory.begin_fetch(chain(1), parent=ROOT, start_block=0) == [None]
    assert directory.finish_fetch(slot, ok=True)
    assert offered(directory, chain(1)) == 1
    with pytest.raises(ValueError, match="not being fetched"):
        directory.finish_fetch(slot, ok=True)


def test_dirty_blocks_stay_until_uploaded_and_too_many_are_not_queued(make: MakeDirectory) -> None:
    directory = make(3, dirty_max_slots=2)
    rooms = reserve(directory, chain(3))
    assert [directory.commit(0, *room) for room in rooms] == [Committed.DIRTY, Committed.DIRTY, Committed.CLEAN]
    assert len(reserve(directory, chain(2, name=2))) == 1, "only the clean one goes"
    assert directory.counters().no_room == 1
    run = [held for held in map(directory.hold, chain(2)) if held is not None]
    assert [held.start_block for held in run] == [0, 1] and run[1].parent == run[0].block
    assert directory.mark_clean(run[0].block, run[0].ticket)
    assert reserve(directory, chain(1, name=3)) == [], "clean, but the uploader reads it"
    directory.finish_upload(run)
    counters = directory.counters()
    assert (counters.dirty, counters.resident, counters.upload_dropped) == (0, 2, 1)
    save(directory, chain(1, name=3))
    assert directory.state(chain(2)[1]) is None, "the tail goes before the head"
    with pytest.raises(ValueError, match="not held"):
        directory.unhold(run[0])


def test_chunks_of_one_chain_go_tail_first_however_they_were_uploaded(make: MakeDirectory) -> None:
    directory = make(6, dirty_max_slots=6)
    blocks = chain(6)
    save(directory, blocks)
    held = [each for each in map(directory.hold, blocks) if each is not None]
    directory.finish_upload(held[:3])
    directory.finish_upload(held[3:])
    directory.finish_upload([])
    for left in (5, 4, 3, 2, 1, 0):
        save(directory, chain(1, name=10 + left))
        directory.hold(chain(1, name=10 + left)[0])
        assert offered(directory, blocks) == left


def test_runs_of_several_chains_may_end_together_and_each_walks_back_once(
    make: MakeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make(8, dirty_max_slots=8)
    chains = [chain(4), chain(4, name=2)]
    for blocks in chains:
        save(directory, blocks)
    walked: list[bytes] = []
    touch = directory.touch_chain

    def counted(tip: bytes, most: int | None = None) -> int:
        walked.append(tip)
        return touch(tip, most)

    monkeypatch.setattr(directory, "touch_chain", counted)
    tails = [*chains[0][2:], *chains[1][2:]]
    heads = [*chains[0][:2], *chains[1][:2]]
    for blocks in (heads, tails):
        directory.finish_upload([held for held in map(directory.hold, blocks) if held is not None])
    assert walked == [chains[0][0], chains[1][0], chains[0][2], chains[1][2]]
    for number in range(8):
        save(directory, chain(1, name=10 + number))
        directory.hold(chain(1, name=10 + number)[0])
        for blocks in chains:
            here = [directory.state(block) is State.RESIDENT for block in blocks]
            assert here == sorted(here, reverse=True), "the tail goes before the head"


def test_saving_a_tail_does_not_evict_the_head_that_was_skipped(make: MakeDirectory) -> None:
    directory = make(3)
    blocks = chain(3)
    save(directory, blocks[:1])
    save(directory, chain(2, name=2))
    save(directory, blocks)
    assert directory.state(blocks[0]) is State.RESIDENT


def test_dropped_blocks_are_found_no_more_and_freed_when_unused(make: MakeDirectory) -> None:
    directory = make(4, dirty_max_slots=4)
    save(directory, chain(3))
    found = directory.match(chain(2), readers={0: "engine"})
    (fetched,) = directory.begin_fetch(chain(1, name=2), parent=ROOT, start_block=0)
    assert fetched is not None
    assert directory.drop([*chain(3), *chain(1, name=2), b"unknown"]) == 4
    counters = directory.counters()
    assert (counters.resident, counters.dirty, counters.doomed, counters.free) == (0, 0, 3, 1)
    assert offered(directory, chain(3)) == 0
    save(directory, chain(1))  # saved anew while the old bytes are still being read
    directory.release(found.lease_id)
    assert not directory.finish_fetch(fetched, ok=True)
    assert directory.counters().free == 3


def test_an_engine_restart_finds_the_arena_warm(make: MakeDirectory) -> None:
    directory = make(4)
    save(directory, chain(4))
    directory.match(chain(4), readers={0: "engine"})
    assert directory.attached(pinned_memory=False, holder="engine")
    directory.holder_gone("engine")
    assert directory.attached(pinned_memory=False, holder="restarted")
    assert len(directory.match(chain(4), readers={0: "restarted"}).slots) == 4


def test_a_broken_connection_frees_nothing_until_the_process_is_gone(make: MakeDirectory) -> None:
    directory = make(2)
    save(directory, chain(1))
    found = directory.match(chain(1), readers={0: "dying", 1: "alive"})
    reserve(directory, chain(1, name=2), holder="dying")
    directory.quarantine_holder("dying")
    directory.release(found.lease_id, 1)
    assert directory.counters().quarantined == 2
    assert reserve(directory, chain(1, name=3)) == []
    directory.holder_back("dying")
    assert directory.counters().quarantined == 0
    directory.holder_gone("dying")
    directory.holder_gone("dying")
    assert len(reserve(directory, chain(2, name=3))) == 2


def test_requests_of_a_process_that_has_exited_get_nothing(make: MakeDirectory) -> None:
    directory = make(4)
    save(directory, chain(2))
    directory.holder_gone("dead")
    assert directory.match(chain(2), readers={0: "alive", 1: "dead"}) == (0, [])
    assert reserve(directory, chain(1, name=2), holder="dead") == []
    directory.holder_back("dead")  # another process, which happens to have its name
    assert len(directory.match(chain(2), readers={0: "alive", 1: "dead"}).slots) == 2
    assert len(reserve(directory, chain(1, name=2), holder="dead")) == 1


def test_only_so_many_dead_processes_are_remembered(make: MakeDirectory) -> None:
    directory = make(1)
    for holder in range(GONE_REMEMBERED + 1):
        directory.holder_gone(holder)
    assert len(directory._book.gone) == GONE_REMEMBERED
    assert directory.reserve(0, ROOT, 0, chain(1), GONE_REMEMBERED) == [None]


def test_tickets_wrap_around(make: MakeDirectory) -> None:
    directory = make(1)
    directory._table.tickets[0] = TICKET_LIMIT - 1
    (room,) = reserve(directory, chain(1))
    assert room.ticket == 0
    assert directory.commit(0, *room) is Committed.CLEAN


def test_a_block_named_twice_in_one_call_is_one_block(make: MakeDirectory) -> None:
    directory = make(3)
    (block,) = chain(1)
    assert len(reserve(directory, [block, block])) == 1
    directory.commit(0, 0, 1)
    found = directory.match([block, block], readers={0: "engine"})
    assert found.slots == [0, 0]
    directory.check()
    directory.release(found.lease_id)
    assert len(reserve(directory, chain(3, name=2))) == 3


def test_a_namespace_without_memory_only_misses(make: MakeDirectory) -> None:
    directory = make(0)
    assert directory.reserve(0, ROOT, 0, chain(2), "engine") == [None, None]
    assert directory.match(chain(2), readers={0: "engine"}) == (0, [])
    assert directory.counters().no_room == 2


@pytest.mark.parametrize(("slots", "parts", "dirty"), [(-1, (0,), 0), (4, (), 0), (4, (0, 0), 0), (4, (0,), -1)])
def test_nonsense_is_refused(make: MakeDirectory, slots: int, parts: tuple[int, ...], dirty: int) -> None:
    with pytest.raises(ValueError):
        make(slots, parts, dirty)


def test_a_lease_without_readers_is_refused(make: MakeDirectory) -> None:
    with pytest.raises(ValueError, match="reader"):
        make(1).match(chain(1), readers={})
