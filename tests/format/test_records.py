"""Catalog records: segments round trip, and the order in which records arrive does not matter."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.format_values import NAMESPACE, RECORDS, added, records, u32

from s3kv.errors import CorruptData
from s3kv.format import segment
from s3kv.format.limits import MAX_SEGMENT_RECORDS
from s3kv.format.records import ChunkAdded, ChunkDeleted, DeleteReason, Record, Stamp, Touched, hour_of, newer
from s3kv.format.wire import seal


@given(st.lists(records, max_size=8), u32, u32)
def test_segments_round_trip(found: list[Record], agent: int, seq: int) -> None:
    data = segment.encode_segment(found, agent, seq, NAMESPACE)
    assert segment.decode_segment(data, expect_namespace=NAMESPACE) == segment.Segment(
        NAMESPACE, agent, seq, tuple(found)
    )
    assert len(data) == segment.SEGMENT_OVERHEAD_BYTES + sum(map(segment.record_bytes, found))


def test_a_segment_of_another_namespace_is_refused() -> None:
    data = segment.encode_segment(RECORDS, 1, 1, NAMESPACE)
    with pytest.raises(CorruptData, match="another namespace"):
        segment.decode_segment(data, expect_namespace=bytes(32))


def test_records_of_a_later_kind_are_skipped_and_counted() -> None:
    data = bytearray(segment.encode_segment([Touched(bytes(16), 1), added(3)], 1, 1, NAMESPACE))
    data[segment.SEGMENT_OVERHEAD_BYTES - 8] = 77
    found = segment.decode_segment(seal(bytes(data[:-8])))
    assert (found.records, found.skipped) == ((added(3),), 1)


def test_a_reason_of_a_later_release_is_other() -> None:
    data = bytearray(segment.encode_segment([ChunkDeleted(bytes(16), Stamp(1, 2))], 1, 1, NAMESPACE))
    data[-12] = 200
    assert segment.decode_segment(seal(bytes(data[:-8]))).records == (
        ChunkDeleted(bytes(16), Stamp(1, 2), DeleteReason.OTHER),
    )


def test_a_segment_beyond_the_limits_is_not_written() -> None:
    with pytest.raises(ValueError, match="exceeds the limits"):
        segment.encode_segment([Touched(bytes(16), 1)] * (MAX_SEGMENT_RECORDS + 1), 1, 1, NAMESPACE)


some_stamps = st.builds(Stamp, st.integers(0, 3), st.integers(0, 1))
of_one_chunk = st.tuples(st.booleans(), some_stamps).map(
    lambda drawn: _deleted(drawn[1]) if drawn[0] else _stamped(drawn[1])
)


@given(st.lists(of_one_chunk, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_order_of_records_ends_in_the_same_state(found: list[ChunkAdded | ChunkDeleted], rng: Random) -> None:
    def settled(order: list[ChunkAdded | ChunkDeleted]) -> ChunkAdded | ChunkDeleted:
        state = order[0]
        for record in order[1:]:
            state = record if newer(record, state) else state
        return state

    shuffled = [*found, *found]
    rng.shuffle(shuffled)
    assert settled(found) == settled(shuffled)


def test_a_deletion_hides_adds_up_to_its_own_stamp() -> None:
    at = Stamp(5, 1)
    gone = _deleted(at)
    assert newer(gone, _stamped(at)) and not newer(_stamped(at), gone)
    assert newer(_stamped(Stamp(5, 2)), gone) and not newer(_stamped(Stamp(4, 9)), gone)


def test_hours_stay_within_the_field() -> None:
    assert (hour_of(7199.9), hour_of(-5), hour_of(1e30)) == (1, 0, (1 << 32) - 1)


@pytest.mark.parametrize("shards", [(), (1, 1), (2, 1), (256,), tuple(range(129))])
def test_impossible_shards_are_refused(shards: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shard"):
        replace(added(1), shards=shards)


def _deleted(stamp: Stamp) -> ChunkDeleted:
    return ChunkDeleted(added(1).chunk_id, stamp)


def _stamped(stamp: Stamp) -> ChunkAdded:
    return replace(added(1), stamp=stamp)
