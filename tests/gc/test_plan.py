"""The planner against a plain re-statement of its rules."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bucket_fill import NOW, chain, small_namespace, tokens_of

from s3kv.catalog.entry import ChunkEntry
from s3kv.catalog.touches import TOUCH_EVERY_HOURS
from s3kv.format.header import chunk_id
from s3kv.format.records import ChunkAdded, GroupObject, Stamp, hour_of
from s3kv.gc.plan import Orphan, Plan, Policy, Reason, Source, make_plan
from s3kv.identity import ROOT

SPEC = small_namespace()
NOW_HOUR = hour_of(NOW)


def entry(hashes: Sequence[bytes], start: int, count: int, *, hours_ago: int, size: int = 100) -> ChunkEntry:
    parent = hashes[start - 1] if start else ROOT
    blocks = tuple(hashes[start : start + count])
    identity = chunk_id(SPEC.digest, parent, blocks)
    added = ChunkAdded(identity, Stamp(1, 1), parent, start, blocks, 0, (0,), (GroupObject(size, 64),))
    return ChunkEntry(added, NOW_HOUR - hours_ago)


def plan_of(entries: Sequence[ChunkEntry], **policy: object) -> Plan:
    return make_plan([Source(SPEC.name, lambda: entries)], Policy(NOW, **policy))  # type: ignore[arg-type]


def chosen(plan: Plan) -> dict[bytes, Reason]:
    return {item.chunk_id: item.reason for item in plan.items()}


def test_case_50_by_age_takes_what_was_idle_for_longer() -> None:
    old = entry(chain(SPEC, "old", 4), 0, 4, hours_ago=100)
    new = entry(chain(SPEC, "new", 4), 0, 4, hours_ago=10)
    assert chosen(plan_of([old, new], max_idle_s=50 * 3600.0)) == {old.chunk_id: Reason.IDLE}


def test_a_touch_counts_until_the_next_one_would_have_been_published() -> None:
    """Agents publish none for some hours after the last: the chunk may be in use all the time."""
    chunk = entry(chain(SPEC, "a", 2), 0, 2, hours_ago=TOUCH_EVERY_HOURS + 2)
    assert not chosen(plan_of([chunk], max_idle_s=3.5 * 3600.0))
    assert chosen(plan_of([chunk], max_idle_s=1.5 * 3600.0))


def test_case_50_by_size_takes_the_least_recently_used_and_no_more_than_needed() -> None:
    entries = [entry(chain(SPEC, f"c{ago}", 2), 0, 2, hours_ago=ago) for ago in (5, 3, 9, 1)]
    plan = plan_of(entries, max_bytes=250)
    assert [item.chunk_id for item in plan.items()] == [entries[2].chunk_id, entries[0].chunk_id]
    assert plan.bytes_before == 400 and plan.bytes_after == 200


def test_a_shared_prefix_stays_while_what_depends_on_it_is_in_use() -> None:
    shared = tokens_of("system", 4)
    stem = entry(chain(SPEC, "x", 2, after=shared), 0, 4, hours_ago=1000)
    leaf = entry(chain(SPEC, "x", 2, after=shared), 4, 2, hours_ago=1)
    other = entry(chain(SPEC, "y", 2, after=shared), 4, 2, hours_ago=900)
    assert set(chosen(plan_of([stem, leaf, other], max_idle_s=3600.0 * 24))) == {other.chunk_id}


def test_dependents_go_before_what_they_hang_on() -> None:
    hashes = chain(SPEC, "deep", 8)
    parts = [entry(hashes, start, 2, hours_ago=500) for start in (0, 2, 4, 6)]
    plan = plan_of([parts[2], parts[0], parts[3], parts[1]], max_bytes=1)
    assert [item.chunk_id for item in plan.items()] == [part.chunk_id for part in reversed(parts)]


def test_superseded_is_what_another_chunk_holds_whole() -> None:
    hashes = chain(SPEC, "run", 10)
    part, middle = entry(hashes, 0, 4, hours_ago=1), entry(hashes, 3, 4, hours_ago=1)
    whole, beyond = entry(hashes, 0, 8, hours_ago=1), entry(hashes, 6, 4, hours_ago=1)
    expected = {part.chunk_id: Reason.SUPERSEDED, middle.chunk_id: Reason.SUPERSEDED}
    assert chosen(plan_of([part, middle, whole, beyond], superseded=True)) == expected


def test_use_of_a_superseded_chunk_keeps_what_covers_it() -> None:
    hashes = chain(SPEC, "run", 8)
    part, whole = entry(hashes, 0, 4, hours_ago=1), entry(hashes, 0, 8, hours_ago=900)
    assert chosen(plan_of([part, whole], superseded=True, max_idle_s=3600.0)) == {part.chunk_id: Reason.SUPERSEDED}


def test_orphans_come_first_and_do_not_count_as_known_bytes() -> None:
    kept = entry(chain(SPEC, "kept", 2), 0, 2, hours_ago=1)
    orphan = Orphan(SPEC.name, bytes(16), 77, 1)
    plan = make_plan([Source(SPEC.name, lambda: [kept])], Policy(NOW), [orphan])
    assert [(item.reason, item.size) for item in plan.items()] == [(Reason.ORPHAN, 77)]
    assert plan.total_bytes == 77 and plan.bytes_after == plan.bytes_before == 100


@pytest.mark.parametrize("policy", [{}, {"max_bytes": 10**9, "max_idle_s": 1e12, "superseded": True}])
def test_nothing_to_do_is_an_empty_plan(policy: dict[str, object]) -> None:
    assert len(plan_of([], **policy)) == 0
    assert len(plan_of([entry(chain(SPEC, "a", 2), 0, 2, hours_ago=1)], **policy)) == 0


@dataclass(frozen=True)
class Piece:
    branch: int
    start: int
    count: int
    hours_ago: int


pieces = st.lists(
    st.builds(Piece, st.integers(0, 2), st.integers(0, 6), st.integers(1, 4), st.integers(1, 40)), max_size=14
)


@given(pieces, st.integers(0, 1500), st.integers(1, 40))
def test_no_plan_leaves_a_chunk_without_what_it_hangs_on(found: list[Piece], max_bytes: int, idle_hours: int) -> None:
    shared = tokens_of("shared", 3)
    branches = [chain(SPEC, f"branch{number}", 9, after=shared) for number in range(3)]
    entries = {
        each.chunk_id: each
        for piece in found
        for each in [entry(branches[piece.branch], piece.start, piece.count, hours_ago=piece.hours_ago)]
    }
    plan = plan_of(list(entries.values()), max_bytes=max_bytes, max_idle_s=idle_hours * 3600.0, superseded=True)
    order = [item.chunk_id for item in plan.items()]
    assert len(set(order)) == len(order)
    stored = dict(entries)
    assert plan.bytes_after <= max_bytes or not plan.bytes_after
    for gone in order:
        held_before = {block for each in stored.values() for block in each.blocks}
        del stored[gone]
        held = {block for each in stored.values() for block in each.blocks}
        for each in stored.values():
            assert each.added.parent in held or each.added.parent not in held_before or each.added.parent == ROOT


MILLION = """
import time, sys, itertools
sys.path.insert(0, "tests")
from types import SimpleNamespace as N
from s3kv.gc.plan import Policy, Source, make_plan
COUNT, BLOCKS = 1_000_000, 4
class Added:
    __slots__ = ("chunk_id", "parent", "start_block", "blocks", "size"); shards = (0,); groups = ((100, 64),)
class Entry:
    __slots__ = ("added", "touched_hour")
def h(number): return (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big") + bytes(8)
def entries():
    for number in range(COUNT):
        added = Added()
        depth = number % 8
        added.chunk_id = number.to_bytes(16, "big"); first = 1 + number * BLOCKS
        added.parent = h(first - 1) if depth else bytes(16)
        added.start_block = depth * BLOCKS
        added.blocks = tuple(map(h, range(first, first + BLOCKS))); added.size = 1000
        entry = Entry(); entry.added = added; entry.touched_hour = number % 5000
        yield entry
plan = make_plan([Source("0" * 32, entries)], Policy(6000 * 3600.0, max_bytes=COUNT * 500, superseded=True))
assert len(plan) >= COUNT // 2, len(plan)
"""


@pytest.mark.slow
def test_a_million_chunks_are_planned_within_a_gigabyte() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))

    subprocess.run([sys.executable, "-c", MILLION], check=True, preexec_fn=limit, timeout=300)
