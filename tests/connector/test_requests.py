"""Request tracking: which blocks a pass completes, and what of an offer is loaded."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.connector_rig import report

from s3kv.connector.blocksize import BlockSizeProof
from s3kv.connector.guard import PromiseBroken
from s3kv.connector.metadata import Save
from s3kv.connector.requests import Offered, RequestTracker, honoured_tokens
from s3kv.identity import ROOT, Chain

KEY = bytes(32)


def tracker(block: int = 32, groups: int = 1, **fields: Any) -> RequestTracker:
    return RequestTracker(block, groups, **fields)


def begin(track: RequestTracker, request_id: int, prompt: list[int], block: int = 32) -> Any:
    state, _ = track.begin(request_id, lambda salt: Chain(KEY, block), prompt, None)
    return state


def offer(track: RequestTracker, request_id: int, start: int, end: int, block: int = 32, parked: bool = False) -> None:
    state = track.get(request_id)
    assert state is not None
    first = start // block
    blocks = -(-end // block) - first
    slots = [] if parked else list(range(100, 100 + blocks))
    state.offered = Offered(start, end, first, blocks, slots, 7, 1, parked)


def saved(saves: list[Save]) -> list[tuple[int, int]]:
    """(ordinal, page of group 0)"""
    return [(each.start + i, page) for each in saves for i, page in enumerate(each.pages[0])]


def test_worked_example_without_chunks() -> None:
    """B=32, prompt 48, 32 output tokens, no overlap: block 0 with the prompt, block 1 and 2 as they fill."""
    track, prompt = tracker(), list(range(48))
    begin(track, 1, prompt)
    found = saved(track.step([report(1, prompt, [5, 6], 0, 48)], []).saves)
    assert found == [(0, 5)]
    for k in range(1, 32):
        page = [7] if 47 + k == 64 else []
        found += saved(track.step([], [report(1, [1000 + k], page, 47 + k, 1)]).saves)
        if k == 15:
            assert found == [(0, 5)]  # token 63 is computed by the pass of report 16
        if k == 16:
            assert found == [(0, 5), (1, 6)]
    assert found == [(0, 5), (1, 6)]


def test_worked_example_chunked_v1() -> None:
    """Prompt 256, chunk 128: report 0 completes blocks 0–3, report 1 blocks 4–7."""
    track, prompt = tracker(), list(range(256))
    begin(track, 1, prompt)
    first = track.step([report(1, prompt, list(range(8)), 0, 128)], []).saves
    second = track.step([], [report(1, [], [], 128, 128)]).saves
    assert saved(first) == [(i, i) for i in range(4)]
    assert saved(second) == [(i, i) for i in range(4, 8)]
    assert (first[0].parent, second[0].parent) == (ROOT, first[0].hashes[3])


def test_case_l1_whole_prompt_in_the_first_report_saves_only_computed_blocks() -> None:
    track, prompt = tracker(), list(range(320))
    begin(track, 1, prompt)
    assert saved(track.step([report(1, prompt, list(range(10)), 0, 70)], []).saves) == [(0, 0), (1, 1)]


def test_appended_pages_of_later_chunks_are_used() -> None:
    """V2: pages come with the chunk that needs them, in cached reports."""
    track, prompt = tracker(), list(range(256))
    begin(track, 1, prompt)
    track.step([report(1, prompt, [10, 11, 12, 13], 0, 128)], [])
    later = track.step([], [report(1, [], [20, 21, 22, 23], 128, 128)]).saves
    assert saved(later) == [(4, 20), (5, 21), (6, 22), (7, 23)]


def test_overlap_lag_never_saves_a_token_that_is_not_known() -> None:
    """The second report has no new token, and the position trails by one."""
    track, prompt = tracker(), list(range(63))
    begin(track, 1, prompt)
    assert saved(track.step([report(1, prompt, [0, 1], 0, 63)], []).saves) == [(0, 0)]
    assert track.step([], [report(1, [], [2], 62, 1)]).saves == []
    assert saved(track.step([], [report(1, [900], [], 63, 1)]).saves) == [(1, 1)]


def test_case_03_pages_missing_in_one_group_are_not_saved_anywhere() -> None:
    """Group 1 has pages [-1, -1, 5]: only block 2 has a page in every group."""
    track, prompt = tracker(groups=2), list(range(96))
    begin(track, 1, prompt)
    saves = track.step([report(1, prompt, [7, 8, 9], 0, 96, [-1, -1, 5])], []).saves
    assert [(each.start, each.pages) for each in saves] == [(2, ((9,), (5,)))]
    assert saves[0].parent == chain_of(prompt)[1]


def chain_of(tokens: list[int]) -> list[bytes]:
    chain = Chain(KEY, 32)
    chain.extend(tokens)
    return chain.hashes


def test_loaded_and_matched_blocks_are_not_saved_again() -> None:
    track, prompt = tracker(), list(range(200))
    begin(track, 1, prompt)
    offer(track, 1, 64, 128)
    track.allocated(SimpleNamespace(py_num_connector_matched_tokens=64), 1, [list(range(7))])
    step = track.step([report(1, prompt, list(range(7)), 64, 72)], [])
    assert [(load.slots, load.pages) for load in step.loads] == [((100, 101), ((2, 3),))]
    assert saved(step.saves) == [(4, 4), (5, 5)]


@pytest.mark.parametrize(
    ("stated", "current", "loaded"),
    [(96, None, 3), (40, None, 2), (0, None, 0), (None, None, 3), (0, 128, 3), (0, 32, 0)],
)
def test_honoured_count_decides_what_is_loaded(stated: int | None, current: int | None, loaded: int) -> None:
    """32 tokens on the device and 96 offered. `current` is the request's own position, loaded tokens included."""
    track, prompt = tracker(), list(range(200))
    begin(track, 1, prompt)
    offer(track, 1, 32, 128)
    request = SimpleNamespace()
    if stated is not None:
        request.py_num_connector_matched_tokens = stated
    if current is not None:
        request.context_current_position = current
    track.allocated(request, 1, [list(range(7))])
    step = track.step([report(1, prompt, list(range(7)), 32, 32)], [])
    assert sum(load.blocks for load in step.loads) == loaded
    assert step.released == ([] if loaded else [(7, 1)])


def test_case_l2_partial_hit_loads_the_rest_alone() -> None:
    """3 blocks are shared on the device and 7 of 10 are stored: pages 0–2 are not written."""
    track, prompt = tracker(), list(range(330))
    begin(track, 1, prompt)
    offer(track, 1, 96, 224)
    step = track.step([report(1, prompt, list(range(50, 61)), 96, 106)], [])
    assert step.loads[0].pages == ((53, 54, 55, 56),)
    assert step.loads[0].slots == (100, 101, 102, 103)


def test_match_inside_a_block_loads_that_block_whole() -> None:
    track, prompt = tracker(), list(range(330))
    begin(track, 1, prompt)
    offer(track, 1, 40, 128)
    step = track.step([report(1, prompt, list(range(11)), 40, 202)], [])
    assert step.loads[0].pages == ((1, 2, 3),)
    assert saved(step.saves)[0] == (4, 4)


def test_cancelled_head_and_tail_are_not_loaded() -> None:
    track, prompt = tracker(), list(range(330))
    begin(track, 1, prompt)
    offer(track, 1, 0, 320)
    track.cancel(1, 0, 64)
    track.cancel(1, 256, 320)
    step = track.step([report(1, prompt, list(range(11)), 64, 10)], [])
    assert step.loads[0].pages == ((2, 3, 4, 5, 6, 7),)
    assert step.loads[0].slots == tuple(range(102, 108))


@pytest.mark.parametrize("ranges", [[(0, 320)], [(0, 160), (160, 320)], [(160, 320), (0, 160)], [(-5, 999)]])
def test_cancelled_offers_are_given_back(ranges: list[tuple[int, int]]) -> None:
    track, prompt = tracker(), list(range(330))
    begin(track, 1, prompt)
    offer(track, 1, 0, 320)
    for start, end in ranges:
        track.cancel(1, start, end)
    step = track.step([report(1, prompt, list(range(11)), 0, 330)], [])
    assert (step.loads, step.released) == ([], [(7, 1)])


def test_every_way_out_gives_the_lease_back_once() -> None:
    """Finished before any report, replaced by another run, and finished after the load was handed over."""
    track, prompt = tracker(), list(range(100))
    begin(track, 1, prompt)
    offer(track, 1, 0, 96)
    assert track.finish(1).released == (7, 1)
    assert track.finish(1).released is None
    begin(track, 1, prompt)
    offer(track, 1, 0, 96)
    _, released = track.begin(1, lambda salt: Chain(KEY, 32), prompt, None)
    assert released == (7, 1)
    offer(track, 1, 0, 96)
    track.step([report(1, prompt, [0, 1, 2, 3], 0, 4)], [])
    assert track.finish(1).released is None
    assert track.take_dropped() == (1,)
    assert len(track) == 0


def test_parked_load_is_handed_once_and_holds_its_pages_until_reported() -> None:
    track, prompt = tracker(), list(range(100))
    begin(track, 1, prompt)
    offer(track, 1, 0, 96, parked=True)
    track.allocated(SimpleNamespace(), 1, [[4, 5, 6, 7]])
    step = track.step([], [])
    assert [(load.pages, load.slots, load.skip) for load in step.parked] == [(((4, 5, 6),), (), 0)]
    assert track.step([], []).parked == []
    assert track.finish(1).hold

    begin(track, 1, prompt)
    offer(track, 1, 0, 96, parked=True)
    track.allocated(SimpleNamespace(), 1, [[4, 5, 6, 7]])
    track.step([], [])
    step = track.step([report(1, prompt, [4, 5, 6, 7], 96, 4)], [])
    assert (step.loads, step.saves) == ([], [])
    assert not track.finish(1).hold


def test_replay_reports_other_pages_and_more_tokens() -> None:
    track, prompt = tracker(), list(range(64))
    begin(track, 1, prompt)
    track.step([report(1, prompt, [0, 1], 0, 64)], [])
    track.step([], [report(1, [500], [2], 64, 1)])
    longer = [*prompt, 500, *range(600, 640)]
    replayed = track.step([report(1, longer, [9, 8, 7, 6], 0, len(longer))], [])
    assert saved(replayed.saves) == [(0, 9), (1, 8), (2, 7)]


def test_low_priority_blocks_are_left_out() -> None:
    track, prompt = tracker(min_priority=50), list(range(96))
    begin(track, 1, prompt)
    data = report(1, prompt, [0, 1, 2], 0, 96, priorities=[80, 10, 50])
    assert saved(track.step([data], []).saves) == [(0, 0), (2, 2)]


def test_blocks_without_a_stated_priority_are_kept() -> None:
    track, prompt = tracker(min_priority=50), list(range(96))
    begin(track, 1, prompt)
    data = report(1, prompt, [0, 1, 2], 0, 96, priorities=[None, 10, None])
    assert saved(track.step([data], []).saves) == [(0, 0), (2, 2)]


def test_pages_that_come_later_than_their_tokens_are_saved_when_they_come() -> None:
    """TensorRT-LLM 13320: the list of a request's pages stood still while its tokens grew."""
    track, prompt = tracker(), list(range(128))
    begin(track, 1, prompt)
    assert saved(track.step([report(1, prompt, [0, 1], 0, 128)], []).saves) == [(0, 0), (1, 1)]
    assert saved(track.step([], [report(1, [5], [], 128, 1)]).saves) == []
    assert saved(track.step([], [report(1, [6], [2, 3], 129, 1)]).saves) == [(2, 2), (3, 3)]


def test_generated_blocks_can_be_left_out() -> None:
    track, prompt = tracker(save_generated=False), list(range(40))
    begin(track, 1, prompt)
    found = saved(track.step([report(1, prompt, [0, 1], 0, 40)], []).saves)
    for k in range(40, 100):
        found += saved(track.step([], [report(1, [k], [k] if k % 32 == 0 else [], k, 1)]).saves)
    assert found == [(0, 0)]


def test_unknown_requests_and_old_reports_are_tolerated() -> None:
    track, prompt = tracker(), list(range(64))
    begin(track, 1, prompt)
    early = SimpleNamespace(
        request_id=1, new_tokens=prompt, new_block_ids=[3, 4], computed_position=0, num_scheduled_tokens=64
    )
    stranger = SimpleNamespace(
        request_id=9, new_tokens=prompt, new_block_ids=[1], computed_position=0, num_scheduled_tokens=64
    )
    assert saved(track.step([stranger, early], [stranger]).saves) == [(0, 3), (1, 4)]


def test_layer_groups_in_a_dict_are_read_in_order() -> None:
    track, prompt = tracker(groups=2), list(range(32))
    begin(track, 1, prompt)
    data = report(1, prompt, [3], 0, 32)
    data.new_block_ids_by_layer_group = {1: [8], 0: [3]}
    assert track.step([data], []).saves[0].pages == ((3,), (8,))


def test_trouble_with_one_request_leaves_the_others_alone() -> None:
    track, prompt = tracker(), list(range(64))
    begin(track, 1, prompt)
    begin(track, 2, [*range(1, 65)])
    bad = report(1, [-5], [0, 1], 0, 64)
    good = report(2, [*range(1, 65)], [2, 3], 0, 64)
    assert saved(track.step([bad, good], []).saves) == [(0, 2), (1, 3)]


def test_a_promised_load_that_cannot_be_planned_stops_the_executor() -> None:
    track, prompt = tracker(), list(range(100))
    begin(track, 1, prompt)
    offer(track, 1, 0, 96)
    with pytest.raises(PromiseBroken, match="request 1"):
        track.step([report(1, [-5], [0, 1, 2], 0, 4)], [])


def test_a_million_requests_leave_nothing_behind() -> None:
    """A thousand of each way of ending; the tracker holds no more than it did."""
    track, prompt = tracker(), list(range(70))
    for number in range(3000):
        begin(track, number % 7, prompt)
        offer(track, number % 7, 0, 64, parked=number % 2 == 0)
        track.allocated(SimpleNamespace(), number % 7, [[0, 1, 2]])
        if number % 3:
            track.step([report(number % 7, prompt, [0, 1, 2], 0 if number % 2 else 64, 6)], [])
        track.finish(number % 7)
        track.take_dropped()
    assert len(track) == 0
    track.step([], [])
    left = {name: value for name, value in vars(track).items() if isinstance(value, dict | list) and value}
    assert left == {}


class TestBlockSizeProof:
    def test_nothing_is_saved_before_two_pages_prove_the_size(self) -> None:
        track = tracker(proof=BlockSizeProof(32, proved=False))
        begin(track, 1, list(range(32)))
        assert track.step([report(1, list(range(32)), [0], 0, 32)], []).saves == []
        begin(track, 2, list(range(64)))
        assert saved(track.step([report(2, list(range(64)), [1, 2], 0, 64)], []).saves) == [(0, 1), (1, 2)]

    @pytest.mark.parametrize(("tokens", "pages"), [(128, 2), (128, 8), (33, 1), (96, 6)])
    def test_case_02_another_block_size_saves_nothing_ever(self, tokens: int, pages: int) -> None:
        proof = BlockSizeProof(32, proved=False)
        proof.see_prompt(tokens, pages)
        assert (proof.holds, proof.broken) == (False, True)
        proof.see_prompt(128, 4)
        assert not proof.holds

    def test_a_page_for_tokens_to_come_is_no_contradiction(self) -> None:
        """An overlapped decode has a page for a token that is not known yet."""
        proof = BlockSizeProof(32, proved=False)
        proof.see_growth(64, 3)
        proof.see_prompt(64, 3)
        assert (proof.holds, proof.broken) == (False, False)
        proof.see_prompt(128, 5)
        assert proof.holds
        proof.see_growth(200, 6)
        assert proof.broken


@given(st.data())
def test_tracking_agrees_with_a_model_of_the_runtime(data: st.DataObject) -> None:
    """Random chunks, matches, offers and lags: saved is exactly what was computed, once, under its hash."""
    block = data.draw(st.sampled_from([1, 3, 4]))
    prompt = [random.Random(data.draw(st.integers(0, 9))).randrange(50) for _ in range(data.draw(st.integers(1, 40)))]
    on_device = data.draw(st.integers(0, len(prompt) - 1))
    honoured = data.draw(st.integers(0, len(prompt) - 1 - on_device))
    generate = data.draw(st.integers(0, 12))
    lag = data.draw(st.booleans())
    track = RequestTracker(block, 1)
    state, _ = track.begin(1, lambda salt: Chain(KEY, block), prompt, None)
    if honoured:
        end = -(-(on_device + honoured) // block) * block
        first = on_device // block
        state.offered = Offered(on_device, end, first, end // block - first, list(range(50)), 7, 1, False)
    track.allocated(SimpleNamespace(py_num_connector_matched_tokens=honoured), 1, [[]])

    tokens, kv, reported, found, computed_at = list(prompt), on_device + honoured, 0, [], {}
    pages_known, new, position = 0, True, on_device
    generated = [100 + i for i in range(generate)]
    while True:
        in_context = kv < len(prompt)
        scheduled = data.draw(st.integers(1, len(prompt) - kv)) if in_context else 1
        position = (on_device if new else kv) if in_context else len(tokens) - 1
        needed = -(-max(kv + scheduled, 1) // block)
        pages = list(range(pages_known, max(needed, pages_known)))
        pages_known = max(needed, pages_known)
        row = report(1, tokens[reported:], pages, position, scheduled)
        reported = len(tokens)
        step = track.step([row] if new else [], [] if new else [row])
        kv += scheduled
        for save in step.saves:
            for i, (name, page) in enumerate(zip(save.hashes, save.pages[0], strict=True)):
                ordinal = save.start + i
                assert (ordinal + 1) * block <= kv, "a block was saved before its tokens were computed"
                assert page == ordinal
                computed_at[ordinal] = name
                found.append(ordinal)
        new = False
        if kv >= len(prompt):
            if not generated and not (lag and len(tokens) > len(prompt)):
                break
            if lag and kv == len(prompt) and len(tokens) == len(prompt) and data.draw(st.booleans()):
                lag = False  # one report without a new token
                continue
            if not generated:
                break
            tokens.append(generated.pop(0))
    expected = Chain(KEY, block)
    expected.extend(tokens)
    assert found == sorted(set(found)), "a block was saved twice"
    assert all(expected.hashes[ordinal] == name for ordinal, name in computed_at.items())
    must = range((on_device + honoured) // block, min(kv, len(tokens)) // block)
    assert set(must) <= set(found) | ({len(tokens) // block - 1} if lag else set())


def test_honoured_tokens_of_a_mock_like_request_is_the_whole_offer() -> None:
    offered = Offered(0, 64, 0, 2, [1, 2], 1, 1, False)
    assert honoured_tokens(object(), offered, 0) == 64
    assert honoured_tokens(None, offered, 0) == 64
