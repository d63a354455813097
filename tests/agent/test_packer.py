from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from s3kv.agent.packer import Packer, Run
from s3kv.identity import ROOT, chain_hashes
from s3kv.tier.block import Held


def chain(length: int, seed: int = 0) -> list[Held]:
    hashes = chain_hashes(bytes(32), 1, [seed * 1000 + i for i in range(length)])
    parents = [ROOT, *hashes]
    return [Held(block, i, 1, parents[i], i) for i, block in enumerate(hashes)]


def packer(blocks: int = 4) -> Packer:
    return Packer(block_bytes=10, target_bytes=10 * blocks, seal_age_s=5.0, seal_grace_s=0.5)


def check_runs(runs: list[Run]) -> None:
    for run in runs:
        for before, after in zip(run.blocks, run.blocks[1:], strict=False):
            assert after.parent == before.block


@given(st.permutations(range(9)), st.permutations(range(5)), st.integers(1, 12))
def test_every_block_goes_out_once_in_runs_of_its_chain(order: list[int], other: list[int], target: int) -> None:
    a, b = chain(9), chain(5, seed=1)
    pack = packer(target)
    runs: list[Run] = []
    for step in range(9):
        runs += pack.add(a[order[step]], 0.0)
        if step < 5:
            runs += pack.add(b[other[step]], 0.0)
    runs += pack.take_all()
    check_runs(runs)
    sent = [held.block for run in runs for held in run.blocks]
    assert sorted(sent) == sorted(held.block for held in a + b)
    assert all(len(run.blocks) <= pack.max_blocks for run in runs)
    assert pack.waiting_blocks == 0 and pack.next_due is None


def test_blocks_in_order_make_full_chunks_and_a_tail() -> None:
    pack = packer(4)
    runs = [run for held in chain(10) for run in pack.add(held, 0.0)]
    assert [len(run.blocks) for run in runs] == [4, 4]
    assert [len(run.blocks) for run in pack.take_all()] == [2]


def test_a_tail_that_grows_begins_where_the_stored_one_ended() -> None:
    pack, blocks = packer(100), chain(6)
    for held in blocks[:3]:
        pack.add(held, 0.0)
    first = pack.take_all()
    for held in blocks[3:]:
        pack.add(held, 1.0)
    second = pack.take_all()
    assert first[0].tip == second[0].parent
    assert [len(first[0].blocks), len(second[0].blocks)] == [3, 3]


def test_sealed_by_age_and_a_moment_after_the_end_of_its_request() -> None:
    pack, blocks = packer(100), chain(3)
    for held in blocks:
        pack.add(held, 10.0)
    assert pack.next_due == 15.0
    assert pack.take_due(14.9) == []
    pack.finish(blocks[-1].block, 11.0)
    assert pack.next_due == 11.5
    assert [len(run.blocks) for run in pack.take_due(11.5)] == [3]


def test_chains_that_fork_share_no_run() -> None:
    trunk = chain(2)
    left = Held(b"L" * 16, 8, 1, trunk[1].block, 2)
    right = Held(b"R" * 16, 9, 1, trunk[1].block, 2)
    pack = packer(100)
    for held in (*trunk, left, right):
        pack.add(held, 0.0)
    runs = pack.take_all()
    check_runs(runs)
    assert sorted(len(run.blocks) for run in runs) == [1, 3]
