"""The model alone: its tokens depend on nothing but the tokens before and what identifies them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from s3kv.sim import Engine, Media, ModelShape, SimConfig, SimRequest, SimResult
from s3kv.sim.workload import text_to_tokens, tokens_to_text

PROMPT = tuple(random.Random(0).randrange(256) for _ in range(150))


def run(config: SimConfig, *prompts: tuple[int, ...], **extra: Any) -> list[SimResult]:
    with Engine(config) as engine:
        return engine.generate([SimRequest(i, prompt, 12, **extra) for i, prompt in enumerate(prompts)])


def same(first: list[SimResult], second: list[SimResult]) -> None:
    assert [result.tokens for result in first] == [result.tokens for result in second]
    for one, other in zip(first, second, strict=True):
        assert one.top_scores == pytest.approx(other.top_scores, abs=1e-9)


PLAIN = SimConfig(reuse=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"manager": "v1"},
        {"chunk_tokens": 16},
        {"chunk_tokens": 48, "overlap": True},
        {"manager": "v1", "chunk_tokens": 64, "overlap": True},
        {"overlap": True, "max_batch_size": 1},
        {"reuse": True, "num_pages": 40, "tokens_per_block": 8},
        {"max_num_tokens": 70, "chunk_tokens": 32},
        {"replicated": "absent", "padding_bytes": 64, "poison": "garbage"},
    ],
)
def test_how_the_runtime_works_does_not_change_tokens(changes: dict[str, Any]) -> None:
    prompts = (PROMPT, PROMPT[:33], (*PROMPT[:97], 1, 2, 3))
    same(run(PLAIN, *prompts), run(replace(PLAIN, **changes), *prompts))


@pytest.mark.parametrize(
    "shape",
    [
        ModelShape(wide_layers=(0,), block_scales=True),
        ModelShape(index_dim=8, windows=(32,)),
        ModelShape(latent_layers=(1, 2)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_every_kind_of_layer_gives_the_same_tokens_in_chunks(shape: ModelShape, dtype: str) -> None:
    config = replace(PLAIN, model=shape, kv_dtype=dtype)
    same(run(config, PROMPT), run(replace(config, chunk_tokens=16, overlap=True), PROMPT))


def test_tensor_parallelism_changes_no_token() -> None:
    shape = ModelShape(num_kv_heads=4, index_dim=4, latent_layers=(3,))
    one = run(replace(PLAIN, model=shape), PROMPT)
    for size in (2, 4):
        same(one, run(replace(PLAIN, model=shape, tp_size=size, ranks="thread"), PROMPT))


@pytest.mark.slow
def test_rank_processes_give_the_tokens_of_one_rank() -> None:
    same(run(PLAIN, PROMPT), run(replace(PLAIN, tp_size=2, ranks="process"), PROMPT))


def test_what_identifies_a_request_changes_its_tokens() -> None:
    picture = (Media(40, 20, "a cat"),)
    other = (Media(40, 20, "a dog"),)
    config = replace(PLAIN, adapters={1: "french", 2: "french", 3: "german"})
    variants: list[dict[str, Any]] = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"lora_task_id": 1}, {"lora_task_id": 3},
        {"media": picture}, {"media": other},
    ]  # fmt: skip
    tokens = [run(config, PROMPT, **variant)[0].tokens for variant in variants]
    assert len(set(tokens)) == len(tokens)
    assert run(config, PROMPT, lora_task_id=2)[0].tokens == tokens[3]


def test_a_wrong_page_gives_wrong_scores() -> None:
    with Engine(PLAIN) as engine:
        engine.submit(SimRequest(1, PROMPT, 12))
        engine.step()
        executor = engine.executors[0]
        first, second = executor.pages(1)[0][2:4]
        for memory in executor.manager.pools[0].memories():
            memory[first] = memory[second]
        damaged = engine.run_until_done()
    right = run(PLAIN, PROMPT)
    assert damaged[0].top_scores != pytest.approx(right[0].top_scores, abs=1e-3)
    assert damaged[0].tokens != right[0].tokens


def test_freed_pages_read_as_nan() -> None:
    with Engine(PLAIN) as engine:
        engine.generate([SimRequest(1, PROMPT, 12)])
        executor = engine.executors[0]
        assert all(pool.used == 0 for pool in executor.manager.pools)
        key = executor.manager.views()[0]["key"]
        assert torch.isnan(key).all()


def test_text_round_trips_and_prefixes_stay_prefixes() -> None:
    tokens = text_to_tokens("Grüße, world")
    assert tokens_to_text(tokens) == "Grüße, world"
    assert text_to_tokens("Grüße")[:6] == tokens[:6]


def test_requests_that_cannot_run_say_why() -> None:
    config = replace(PLAIN, num_pages=4, max_num_tokens=40)
    results = run(config, PROMPT, PROMPT[:50], PROMPT[:20])
    assert [result.error for result in results] == [
        "needs 11 pages, num_pages is 4", "50 prompt tokens exceed max_num_tokens 40", None,
    ]  # fmt: skip
