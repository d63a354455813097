"""The order of computing, and its execution."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.identity import GroupSpec, NamespaceSpec, RegionSpec, Scope, chain_hashes
from s3kv.warm.plan import Chained, UnknownAdapter, chained, left_out, order
from s3kv.warm.prompts import Prompt
from s3kv.warm.through import ServerError, send_steps, send_through

SPEC = NamespaceSpec("m", "w", "bfloat16", 2, (GroupSpec((0,), None, (RegionSpec(64),)),))


def prompt(*tokens: int) -> Chained:
    return chained(Prompt("p", token_ids=tokens), tokens, SPEC, {})


def test_the_longest_shared_prefix_goes_first_and_others_wait_for_it() -> None:
    prompts = [prompt(9, 9, 9, 9), prompt(1, 2, 3, 4, 5, 6), prompt(1, 2, 3, 4, 7, 8), prompt(1, 2, 5, 5)]
    steps = order(prompts)
    assert [step.item for step in steps] == [1, 2, 3, 0]
    assert [(step.after, step.shared) for step in steps] == [(None, 0), (0, 2), (0, 1), (None, 0)]


def test_what_is_stored_or_the_same_is_not_computed() -> None:
    prompts = [prompt(1, 2, 3, 4), prompt(1, 2, 3, 4), prompt(5, 6), prompt(1)]
    assert [step.item for step in order(prompts, [0, 0, 1, 0])] == [0]


sequences = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=8)


@given(sequences, sequences)
def test_every_block_is_computed_once_after_what_it_hangs_on(lists: list[list[int]], bucket: list[list[int]]) -> None:
    prompts = [prompt(*tokens) for tokens in lists]
    held = {block for tokens in bucket for block in prompt(*tokens).hashes}
    stored = [sum(1 for block in each.hashes if block in held) for each in prompts]
    steps = order(prompts, stored)
    computed: dict[bytes, int] = {}
    for number, step in enumerate(steps):
        hashes = prompts[step.item].hashes
        assert step.after is None or step.after < number
        before = hashes[stored[step.item] : step.shared]
        assert all(block in computed for block in before)
        assert not before or computed[before[-1]] == step.after
        for block in hashes[step.shared :]:
            assert block not in computed
            computed[block] = number
    assert set(computed) == {block for each in prompts for block in each.hashes} - held


def test_keys_are_those_of_the_one_chain() -> None:
    made = chained(Prompt("p", cache_salt="s", lora="4"), (1, 2, 3, 4, 5), SPEC, {"4": "adapter"})
    scope = Scope(cache_salt="s", adapter="adapter")
    assert list(made.hashes) == chain_hashes(SPEC.digest, 2, [1, 2, 3, 4], scope=scope)


def test_an_adapter_without_identity_is_not_guessed() -> None:
    with pytest.raises(UnknownAdapter, match=r"identity\.adapters"):
        chained(Prompt("p", lora="4"), (1, 2), SPEC, {})


async def test_steps_run_after_what_they_build_on_and_failures_stay_alone() -> None:
    prompts = [prompt(1, 2, 3, 4), prompt(1, 2, 5, 6), prompt(1, 2, 7, 8), prompt(9, 9)]
    steps = order(prompts)
    began: list[int] = []
    busy = most = 0

    async def compute(item: int) -> None:
        nonlocal busy, most
        began.append(item)
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0)
        busy -= 1
        if item == 0:
            raise ServerError("no")

    sent = await send_steps(steps, compute, concurrency=2)
    assert sent.errors == {0: "no"} and sorted(sent.done) == [1, 2, 3]
    assert most == 2 and began.index(0) < min(began.index(1), began.index(2))


class Refusing:
    """A server that refuses these prompts."""

    def __init__(self, *refused: Chained) -> None:
        self.refused = refused
        self.asked: list[Chained] = []

    def model(self) -> str:
        return "m"

    def compute(self, item: Chained) -> None:
        self.asked.append(item)
        if item in self.refused:
            raise ServerError("too long")


async def test_what_a_refused_prompt_was_to_compute_is_sent_by_itself() -> None:
    turns = [prompt(*range(end)) for end in (2, 4, 8, 10)]
    other = prompt(0, 1, 2, 3, 9, 9)
    prompts = [*turns, other]
    server = Refusing(turns[3], turns[2])
    sent = await send_through(server, prompts, order(prompts), concurrency=4)  # type: ignore[arg-type]
    assert server.asked == [turns[3], other, turns[2]], "the other one computes what the two shortest need"
    assert sent.errors == {3: "too long", 2: "too long"} and sent.done == [4]
    server = Refusing(turns[3], turns[2], other)
    sent = await send_through(server, prompts, order(prompts), concurrency=4)  # type: ignore[arg-type]
    assert server.asked[-1] is turns[1] and sorted(sent.errors) == [2, 3, 4] and sent.done == [1]


@given(sequences, sequences, st.sets(st.integers(0, 7)))
def test_every_prompt_is_computed_stored_or_refused(
    lists: list[list[int]], bucket: list[list[int]], refused: set[int]
) -> None:
    prompts = [prompt(*tokens) for tokens in lists]
    held = {block for tokens in bucket for block in prompt(*tokens).hashes}
    sent, ahead = [], order(prompts, [sum(1 for block in each.hashes if block in held) for each in prompts])
    while ahead:
        sent += ahead
        held |= {block for step in ahead if step.item not in refused for block in prompts[step.item].hashes}
        ahead = left_out(prompts, sent, refused)
    assert len({step.item for step in sent}) == len(sent), "nothing is sent twice"
    assert all(held.issuperset(each.hashes) for item, each in enumerate(prompts) if item not in refused)
