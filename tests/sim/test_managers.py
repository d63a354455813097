"""The cache managers: reuse never reads a page that is gone, and slots go to the next request at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from s3kv.sim import Engine, ModelShape, ReplayPolicy, SimConfig, SimRequest
from s3kv.sim.managers import CacheShape, ManagerV1, ManagerV2
from s3kv.sim.workload import WorkloadShape, random_workload

WINDOWS = ModelShape(num_layers=2, hidden=32, num_heads=2, num_kv_heads=1, mlp=32, windows=(None, 40))
PROMPT = tuple(random.Random(1).randrange(256) for _ in range(160))
CPU = torch.device("cpu")


def run(engine: Engine, request_id: int, prompt: tuple[int, ...], **extra: Any) -> tuple[int, tuple[int, ...]]:
    (result,) = engine.generate([SimRequest(request_id, prompt, 4, **extra)])
    return result.reused_tokens, result.tokens


def test_a_windowed_prefix_is_reused_only_where_its_window_is_still_there() -> None:
    with Engine(SimConfig(model=WINDOWS)) as plain:
        expected = [run(plain, i, PROMPT[:length])[1] for i, length in enumerate((160, 100, 160))]
    with Engine(SimConfig(model=WINDOWS)) as engine:
        assert run(engine, 1, PROMPT) == (0, expected[0])
        # Of the windowed group the pages from token 112 on are left: a prefix that ends before lacks its window.
        assert run(engine, 2, PROMPT[:100]) == (0, expected[1])
        reused, tokens = run(engine, 3, PROMPT)
    assert (reused, tokens) == (159, expected[2])


def test_v1_reuses_any_prefix_and_part_of_a_block() -> None:
    changed = (*PROMPT[:73], 0, *PROMPT[74:])
    with Engine(SimConfig(model=WINDOWS, manager="v1")) as engine:
        run(engine, 1, PROMPT)
        assert run(engine, 2, PROMPT[:100])[0] == 99
        assert run(engine, 3, changed)[0] == 73
    with Engine(SimConfig(model=WINDOWS, manager="v1", partial_reuse=False)) as engine:
        run(engine, 1, PROMPT)
        assert run(engine, 2, PROMPT[:100])[0] == 96
        assert run(engine, 3, changed)[0] == 64


def test_salt_and_adapter_keep_pages_apart_on_the_device() -> None:
    with Engine(SimConfig(model=WINDOWS, adapters={1: "a", 2: "a"})) as engine:
        run(engine, 1, PROMPT)
        assert run(engine, 2, PROMPT, cache_salt="x")[0] == 0
        assert run(engine, 3, PROMPT, lora_task_id=1)[0] == 0
        assert run(engine, 4, PROMPT, lora_task_id=2)[0] == 159


def test_a_freed_slot_is_the_next_to_be_handed_out_and_poisoned_before() -> None:
    manager = ManagerV2(CacheShape(WINDOWS, num_pages=8), reuse=False, partial=False, device=CPU)
    manager.begin(1, None, manager.lookup(None, [], ((), ()), 0))
    assert manager.grow(1, 80, 0)
    key = manager.views()[1]["key"]
    key.zero_()
    manager.trim(1, 60)
    passed = [ordinal for ordinal, page in enumerate(manager.pages(1)[1]) if page < 0]
    assert passed == [0]
    assert torch.isnan(key[0]).all()
    assert not torch.isnan(key[1]).any()
    manager.begin(2, None, manager.lookup(None, [], ((), ()), 0))
    assert manager.grow(2, 16, 0)
    assert manager.pages(2) == [[5], [0]]
    assert not manager.grow(2, 80, 0)
    assert manager.pages(2) == [[5], [0]]


def test_a_destroyed_request_comes_back_on_other_pages() -> None:
    manager = ManagerV2(CacheShape(WINDOWS, num_pages=16), reuse=True, partial=True, device=CPU)
    for request_id, destroy in ((1, True), (2, False)):
        manager.begin(request_id, (), manager.lookup((), [], ((), ()), 0))
        manager.grow(request_id, 64, 0)
        if destroy:
            before = manager.pages(request_id)
            manager.release(request_id, destroy=True)
    assert not set(before[0]) & set(manager.pages(2)[0])


def test_v1_is_one_tensor_and_says_what_it_cannot_hold() -> None:
    manager = ManagerV1(CacheShape(WINDOWS, num_pages=8), reuse=True, partial=True, device=CPU)
    assert manager.tensor().shape == (8, 2, 2, 16 * 16)
    manager.tensor()[3, 1, 0] = 7.0
    assert (manager.views()[1]["key"][3] == 7.0).all()
    for shape in (ModelShape(block_scales=True), ModelShape(latent_layers=(1,)), ModelShape(wide_layers=(1,))):
        with pytest.raises(ValueError, match="v1"):
            ManagerV1(CacheShape(shape), reuse=True, partial=True, device=CPU)


def test_layouts_describe_every_byte_once() -> None:
    model = ModelShape(index_dim=8, block_scales=True, wide_layers=(0,), latent_layers=(3,))
    for kind in ("used", "empty", "absent"):
        manager = ManagerV2(
            CacheShape(model, num_pages=4, padding_bytes=32, replicated=kind),  # type: ignore[arg-type]
            reuse=True, partial=True, device=CPU,
        )  # fmt: skip
        layout = manager.layout()
        assert layout.as_single_pool_tensor() is None
        assert [group.window_size for group in layout.groups] == [None, 64]
        for group, pool in zip(layout.groups, manager.pools, strict=True):
            replicated = getattr(group, "replicated_regions", ())
            assert hasattr(group, "replicated_regions") == (kind != "absent")
            assert {buffer.role for region in replicated for buffer in region.buffers} == (
                set() if kind != "used" else {"index_key", "key"} if group.layer_group_id else {"index_key"}
            )
            for region in (*group.regions, *replicated):
                region.as_tensor().fill_(1)
            unnamed = sum(int((memory != 1).sum()) for memory in pool.memories())
            assert unnamed == 4 * 32 * len(pool.memories())


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_any_runtime_gives_the_tokens_of_the_plainest(seed: int, data: st.DataObject) -> None:
    shape = WorkloadShape(requests=5, max_prompt=120, max_new_tokens=24, salts=1, adapters=1, cancellations=0.2)
    workload = random_workload(random.Random(seed), shape)
    manager = data.draw(st.sampled_from(["v1", "v2"]))
    config = SimConfig(
        model=WINDOWS,
        manager=manager,  # type: ignore[arg-type]
        chunk_tokens=data.draw(st.sampled_from([None, 16, 40])),
        overlap=data.draw(st.booleans()),
        partial_reuse=data.draw(st.booleans()),
        num_pages=data.draw(st.sampled_from([10, 14, 64])),
        max_num_tokens=data.draw(st.sampled_from([144, 1000])),
        max_batch_size=data.draw(st.sampled_from([1, 3])),
        replays=ReplayPolicy(data.draw(st.sampled_from([0.0, 0.1])) if manager == "v2" else 0.0, seed),
        dummies=data.draw(st.sampled_from([0, 2])),
    )
    with Engine(SimConfig(model=WINDOWS, reuse=False)) as plain:
        expected = plain.generate([SimRequest(r.request_id, r.prompt_tokens, r.max_new_tokens, r.cache_salt,
                                              r.lora_task_id) for r in workload])  # fmt: skip
    with Engine(config) as engine:
        results = engine.generate(workload)
        engine.executors[0].check_clean()
    for want, got in zip(expected, results, strict=True):
        assert got.tokens == want.tokens[: len(got.tokens)]
        assert got.top_scores == pytest.approx(want.top_scores[: len(got.top_scores)], abs=1e-9)
        assert got.error == "cancelled" or len(got.tokens) == len(want.tokens)
