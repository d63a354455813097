"""Offers: whom they are made to, how large they are, and under which identity."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.connector_rig import FakeRequest, namespace_for, output, pages_cache, report
from support.fake_agent import FakeAgent

from s3kv.connector.guard import PromiseBroken, Troubles
from s3kv.connector.modality import text_only
from s3kv.connector.planner import Planner
from s3kv.connector.scope import request_identity
from s3kv.identity import MediaSpan, Scope, chain_hashes
from s3kv.settings import load_settings

BLOCK = 32


class Rig:
    """A planner, and an agent that holds whatever `store` was told to."""

    def __init__(self, *, text_only: bool = True, **sections: Any) -> None:
        self.text_only = text_only
        self.cache, _ = pages_cache(pages=64, tokens_per_block=BLOCK)
        self.namespace = namespace_for(self.cache, BLOCK)
        self.agent = FakeAgent(slots=64)
        self.settings = load_settings(**sections)
        self.planner = self.another_server()

    def another_server(self) -> Planner:
        leader = self.agent.leader(self.settings, self.namespace, ranks=1, engine_id="e")
        return Planner(self.settings, self.namespace, self.cache, leader, text_only=self.text_only, troubles=Troubles())

    def run(self, request: FakeRequest, computed: int = 0, planner: Planner | None = None) -> tuple[int, bool]:
        """Ask, compute all of the prompt, store what is to be saved, and end. Returns the offer."""
        planner = planner or self.planner
        offered = planner.match(request, computed)
        pages = list(range(-(-len(request.tokens) // BLOCK)))
        planner.allocated(request, [pages])
        scheduled = len(request.tokens) - computed - offered[0]
        meta = planner.plan(output([report(request.request_id, request.tokens, pages, computed, scheduled)]))
        directory = self.agent.directory(self.namespace)
        for save in meta.saves if meta else ():
            places = self.agent.reserve(directory, 0, save.parent, save.start, save.hashes)
            indices = [i for i, slot in enumerate(places.slots) if slot >= 0]
            self.agent.commit(directory, 0, places, indices)
        for load in meta.loads if meta else ():
            self.agent.release(directory, load.lease, load.epoch, 0)
        assert planner.finish(request) is False
        self.agent.check_at_rest()
        assert len(planner.tracker) == 0
        return offered

    def stored(self) -> set[bytes]:
        return set(self.agent.blocks_saved())


PROMPT = list(range(128))


@pytest.mark.parametrize(("computed", "expected"), [(0, 96), (32, 64), (40, 56), (95, 1), (96, 0), (100, 0), (127, 0)])
def test_case_10_one_token_is_left_to_compute_and_offers_are_never_negative(computed: int, expected: int) -> None:
    rig = Rig()
    rig.run(FakeRequest(1, [*PROMPT, 1]))
    assert len(rig.stored()) == 4
    assert rig.run(FakeRequest(2, PROMPT), computed) == (expected, False)


def test_a_replayed_prompt_is_as_long_as_the_runtime_says() -> None:
    rig = Rig()
    rig.run(FakeRequest(1, [*PROMPT, 1]))
    assert rig.run(FakeRequest(2, [*PROMPT, 5, 6], prompt_len=65)) == (64, False)


def test_case_13_salts_and_adapters_keep_requests_apart() -> None:
    rig = Rig(identity={"adapters": {"5": "summary", "6": "summary", "7": "translation"}})
    number = iter(range(100))

    def offered(**fields: Any) -> int:
        return rig.run(FakeRequest(next(number), PROMPT, **fields))[0]

    kinds: list[dict[str, Any]] = [
        {"cache_salt": "x"}, {"cache_salt": "y"}, {}, {"lora_task_id": 5}, {"lora_task_id": 7},
        {"lora_task_id": 5, "cache_salt": "x"}, {"cache_salt": "5"}, {"cache_salt": ""},
    ]  # fmt: skip
    assert [offered(**kind) for kind in kinds] == [0] * len(kinds)
    assert [offered(**kind) for kind in kinds] == [96] * len(kinds)
    assert offered(lora_task_id=6) == 96  # the same adapter under this server's other number


def test_unnamed_adapters_are_this_servers_alone() -> None:
    rig = Rig()
    rig.run(FakeRequest(1, PROMPT, lora_task_id=9))
    assert rig.run(FakeRequest(2, PROMPT, lora_task_id=9))[0] == 96
    assert rig.run(FakeRequest(3, PROMPT, lora_task_id=9), planner=rig.another_server())[0] == 0
    assert rig.run(FakeRequest(4, PROMPT))[0] == 0


@pytest.mark.parametrize("salt", [b"x", 5, 0, ("x",)])
def test_a_salt_of_another_type_never_shares_with_requests_without_one(salt: object) -> None:
    rig = Rig()
    assert rig.run(FakeRequest(1, PROMPT, cache_salt=salt))[0] == 0
    assert rig.run(FakeRequest(2, PROMPT, cache_salt=salt))[0] == 96
    assert rig.run(FakeRequest(3, PROMPT))[0] == 0
    assert rig.run(FakeRequest(4, PROMPT, cache_salt=str(salt)))[0] == 0


def test_adapter_0_is_an_adapter() -> None:
    rig = Rig(identity={"adapters": {"0": "summary"}})
    rig.run(FakeRequest(1, PROMPT))
    assert rig.run(FakeRequest(2, PROMPT, lora_task_id=0))[0] == 0
    assert rig.run(FakeRequest(3, PROMPT, lora_task_id=0))[0] == 96


class RawTokens(FakeRequest):
    """The runtime hands the token ids over as `raw`."""

    def get_tokens(self, beam: int) -> Any:
        return self.raw  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [tuple, np.array, partial(np.array, dtype=np.int32), torch.tensor, lambda ids: list(np.array(ids))],
    ids=["tuple", "int64 array", "int32 array", "tensor", "list of numpy ints"],
)
def test_token_ids_may_come_as_arrays_and_tensors(make: Callable[[list[int]], Any]) -> None:
    rig = Rig()
    rig.run(FakeRequest(1, PROMPT))
    assert rig.run(RawTokens(2, PROMPT, raw=make(PROMPT)))[0] == 96


@pytest.mark.parametrize("raw", [None, [], (), np.array([]), torch.tensor([])], ids=repr)
def test_case_13_no_token_ids_of_any_kind(raw: object) -> None:
    rig = Rig()
    assert rig.planner.match(RawTokens(1, PROMPT, raw=raw), 0) == (0, False)
    assert rig.stored() == set() and len(rig.planner.tracker) == 0


@pytest.mark.parametrize("computed", [-1, -32, 128, 129, 10_000])
def test_a_position_outside_the_prompt_gets_no_offer(computed: int) -> None:
    rig = Rig()
    rig.run(FakeRequest(1, [*PROMPT, 1]))
    assert rig.planner.match(FakeRequest(2, PROMPT), computed) == (0, False)


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (31, 0), (32, 0), (33, 32), (64, 32), (65, 64)])
def test_prompts_around_the_block_size(length: int, expected: int) -> None:
    rig = Rig()
    rig.run(FakeRequest(1, [*PROMPT, 1]))
    assert rig.run(FakeRequest(2, PROMPT[:length])) == (expected, False)


class WithoutTokens(FakeRequest):
    def get_tokens(self, beam: int) -> list[int]:
        return []


def test_case_13_a_request_without_token_ids_is_left_alone() -> None:
    rig = Rig()
    assert rig.run(WithoutTokens(1, PROMPT)) == (0, False)
    assert rig.run(FakeRequest(2, PROMPT, get_tokens=None)) == (0, False)
    assert rig.stored() == set()


@pytest.mark.parametrize(
    "fields",
    [
        {"is_dummy_request": True},
        {"multimodal_positions": [3], "multimodal_lengths": [4]},
        {"multimodal_embedding": [object()]},
        {"py_multimodal_data": {"image": 1}},
        {"prompt_embedding_table": object()},
    ],
)
def test_requests_whose_bytes_tokens_do_not_tell_are_left_alone(fields: dict[str, Any]) -> None:
    rig = Rig()
    assert rig.run(FakeRequest(1, PROMPT, **fields)) == (0, False)
    assert rig.stored() == set()
    assert rig.agent.clients[-1].matches == 0


def test_media_with_hashes_are_part_of_the_identity() -> None:
    rig = Rig()

    def picture(number: int, words: list[int]) -> FakeRequest:
        return FakeRequest(
            number, PROMPT, multimodal_hashes=[words], multimodal_positions=[40], multimodal_lengths=[8],
        )  # fmt: skip

    rig.run(picture(1, [1, -2, 3, 4, 5, 6, 7, 8]))
    assert rig.run(picture(2, [1, -2, 3, 4, 5, 6, 7, 8]))[0] == 96
    assert rig.run(picture(3, [1, 2, 3, 4, 5, 6, 7, 8]))[0] == 32  # the block before the picture is common
    assert rig.run(FakeRequest(4, PROMPT))[0] == 32


PICTURE = {"py_multimodal_data": {"image": {"pixel_values": object()}}}


def run_v1(rig: Rig, number: int, **python: Any) -> int:
    """V1: the query is given the native request, without what Python added. Returns the tokens offered."""
    offered = rig.planner.match(FakeRequest(number, PROMPT), 0)[0]
    request = FakeRequest(number, PROMPT, **{"py_multimodal_data": None, **python})
    rig.planner.allocated(request, [[0, 1, 2, 3]])
    meta = rig.planner.plan(output([report(number, PROMPT, [0, 1, 2, 3], 0, 128 - offered)]))
    directory = rig.agent.directory(rig.namespace)
    for save in meta.saves if meta else ():
        places = rig.agent.reserve(directory, 0, save.parent, save.start, save.hashes)
        rig.agent.commit(directory, 0, places, [i for i, slot in enumerate(places.slots) if slot >= 0])
    for load in meta.loads if meta else ():
        rig.agent.release(directory, load.lease, load.epoch, 0)
    rig.planner.finish(request)
    rig.agent.check_at_rest()
    return offered


def test_v1_requests_of_a_model_that_takes_media_are_saved_and_offered_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(text_only=False)
    assert [run_v1(rig, number) for number in (1, 2)] == [0, 0]
    assert len(rig.stored()) == 4
    assert rig.agent.clients[-1].matches == 0
    assert caplog.text.count("use_kv_cache_manager_v2") == 1
    shown = {"py_multimodal_data": None}  # V2, and releases whose query is given the Python object
    assert rig.run(FakeRequest(3, PROMPT, **shown))[0] == 96
    hashed = {"multimodal_hashes": [[1] * 8], "multimodal_positions": [40], "multimodal_lengths": [8]}
    assert rig.run(FakeRequest(4, PROMPT, **hashed))[0] == 32  # natively too


def test_media_that_v1_shows_late_are_never_saved_as_text() -> None:
    for known in (False, True):
        rig = Rig(text_only=known)
        assert run_v1(rig, 1, **PICTURE) == 0
        assert rig.stored() == set()


def test_media_that_v1_shows_after_an_offer_stop_the_executor() -> None:
    rig = Rig()
    assert [run_v1(rig, number) for number in (1, 2)] == [0, 96]
    with pytest.raises(PromiseBroken, match="use_kv_cache_manager_v2"):
        run_v1(rig, 3, **PICTURE)
    assert len(rig.planner.tracker) == 0
    rig.agent.check_at_rest()
    assert run_v1(rig, 4) == 0  # the model is known to take media now


CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"factor": 8}, "use_mrope": False}


@pytest.mark.parametrize(
    ("changes", "files", "expected"),
    [
        ({}, [], True),
        ({}, ["tokenizer_config.json", "model.safetensors"], True),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, [], False),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, [], False),
        ({"architectures": None}, [], False),
        ({"architectures": [5]}, [], False),
        ({"vision_config": None}, [], False),
        ({"mm_hidden_size": 5}, [], False),
        ({"text_config": [{"deep": {"audio_token_id": 7}}]}, [], False),
        ({"embd_layer": {"image_embd_layer": {}}}, [], False),
        ({"code_revision": "main", "quantization_config": {"base_model_revision": "x"}}, [], True),
        ({"revision": "x", "vision_revision": "y"}, [], False),
        ({}, ["preprocessor_config.json"], False),
        ({}, ["processor_config.json"], False),
    ],
)
def test_a_checkpoint_is_for_text_alone_only_where_nothing_speaks_against_it(
    changes: dict[str, Any], files: list[str], expected: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    for name in files:
        (tmp_path / name).touch()
    assert text_only(tmp_path) is expected


def test_a_checkpoint_that_cannot_be_read_may_be_anything(tmp_path: Path) -> None:
    assert not text_only(None) and not text_only(tmp_path) and not text_only(tmp_path / "missing")
    for text in ("[]", "{", "5", '"LlamaForCausalLM"'):
        (tmp_path / "config.json").write_text(text)
        assert not text_only(tmp_path)


def test_media_of_unknown_place_are_part_of_every_block() -> None:
    identity = request_identity(FakeRequest(1, PROMPT, multimodal_hashes=[[1] * 8]), {}, "server", 128)
    assert identity is not None
    assert identity[1] == (MediaSpan(0, 128, b"".join(bytes([0, 0, 0, 1]) for _ in range(8))),)
    text = request_identity(FakeRequest(1, PROMPT, multimodal_hashes=["ab", b"cd"]), {}, "server", 9)
    assert text is not None and [span.digest for span in text[1]] == [b"ab", b"cd"]


def test_releases_that_show_only_the_salts_number_are_kept_apart_by_it() -> None:
    old = request_identity(SimpleNamespace(cache_salt_id=7), {}, "s", 1)
    named = request_identity(SimpleNamespace(cache_salt="7", cache_salt_id=7), {}, "s", 1)
    assert old is not None and named is not None
    assert named[0] == Scope(cache_salt="7")
    assert old[0] not in (Scope(), named[0])


def test_a_salt_that_only_the_report_shows_is_saved_under() -> None:
    rig = Rig()
    request = FakeRequest(1, PROMPT)
    rig.planner.match(request, 0)
    pages = [0, 1, 2, 3]
    meta = rig.planner.plan(output([report(1, PROMPT, pages, 0, 128, cache_salt="secret")]))
    assert meta is not None
    expected = chain_hashes(rig.namespace.digest, BLOCK, PROMPT, scope=Scope(cache_salt="secret"))
    assert list(meta.saves[0].hashes) == expected


def test_case_08_keys_are_those_of_anybody_who_knows_the_identity() -> None:
    """The CLI's way, `chain_hashes`, gives the connector's keys: same tokens, salt and adapter."""
    rig = Rig(identity={"adapters": {"5": "summary"}})
    rig.run(FakeRequest(1, PROMPT, cache_salt="x", lora_task_id=5))
    scope = Scope(cache_salt="x", adapter="summary")
    assert rig.stored() == set(chain_hashes(rig.namespace.digest, BLOCK, PROMPT, scope=scope))
    assert all(len(name) == 16 for name in rig.stored())  # case 17: 128 bits


def test_case_16_keys_do_not_depend_on_the_process() -> None:
    code = (
        "from s3kv.identity import *; s = Scope('x', 'a')\n"
        "print([h.hex() for h in chain_hashes(bytes(32), 4, range(20), scope=s)])"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, timeout=60
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


def test_case_19_the_salt_is_in_nothing_that_leaves_the_leader(caplog: pytest.LogCaptureFixture) -> None:
    import pickle

    rig = Rig()
    request = FakeRequest(1, PROMPT, cache_salt="the-raw-salt")
    rig.planner.match(request, 0)
    meta = rig.planner.plan(output([report(1, PROMPT, [0, 1, 2, 3], 0, 128)]))
    assert meta is not None and meta.saves
    assert b"the-raw-salt" not in pickle.dumps(meta) + rig.namespace.to_json()
    assert "the-raw-salt" not in caplog.text


def test_offers_below_the_minimum_are_not_made() -> None:
    rig = Rig(load={"min_tokens": 60})
    rig.run(FakeRequest(1, PROMPT))
    assert rig.run(FakeRequest(2, PROMPT), 40)[0] == 0
    assert rig.run(FakeRequest(3, PROMPT), 32)[0] == 64


def test_asked_again_without_a_report_gives_the_first_lease_back() -> None:
    rig = Rig()
    rig.run(FakeRequest(1, PROMPT))
    request = FakeRequest(2, PROMPT)
    assert [rig.planner.match(request, 0)[0] for _ in range(3)] == [96] * 3
    assert len(rig.agent.directory(rig.namespace).leases) == 1
    assert rig.planner.finish(request) is False
    rig.agent.check_at_rest()


def test_parked_only_while_something_is_missing() -> None:
    rig = Rig(load={"policy": "park"})
    rig.agent.fetch_polls = 2
    rig.run(FakeRequest(1, PROMPT))
    assert rig.planner.match(FakeRequest(2, PROMPT), 0) == (96, False)
    rig.planner.finish(FakeRequest(2, PROMPT))
    rig.agent.forget_tier()
    request = FakeRequest(3, PROMPT)
    assert rig.planner.match(request, 0) == (96, True)
    rig.planner.allocated(request, [[0, 1, 2, 3]])
    meta = rig.planner.plan(output())
    assert meta is not None and meta.parked[0].pages == ((0, 1, 2),)
    assert rig.planner.plan(output()) is None
    assert rig.planner.finish(request) is True
    meta = rig.planner.plan(output())
    assert meta is not None and meta.dropped == (3,)


def test_end_of_a_request_is_told_with_its_last_saved_block() -> None:
    rig = Rig()
    rig.run(FakeRequest(1, PROMPT))
    assert rig.agent.finished == [chain_hashes(rig.namespace.digest, BLOCK, PROMPT)[-1]]
    rig.run(FakeRequest(2, PROMPT[:20]))
    assert len(rig.agent.finished) == 1
