"""`s3kv warm` end to end: an OpenAI-compatible server before a simulated engine, its agent, and a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command import Cli
from support.servers import S3Place
from support.serving import BLOCK_TOKENS, Served, sim_server

SYSTEM = "You are a patient assistant of a public library. " * 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with sim_server(tmp_path_factory.mktemp("serve"), 'identity.adapters={"7": "tests/adapter-seven"}') as running:
        yield running


def lines(folder: Path, name: str, *prompts: dict[str, object]) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return str(path)


def test_through_computes_what_is_missing_once_and_says_what_was_gained(served: Served, tmp_path: Path) -> None:
    texts = [f"{SYSTEM}Question {number}: {'why? ' * number}" for number in range(1, 5)]
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(texts) + "\nshort\n")
    warm = ("warm", str(path), "--tokenizer", "bytes")
    before = served.cli(*warm, "--json").ok().json
    assert [each["stored_blocks"] for each in before["prompts"]] == [0] * 5
    ran = served.cli(*warm, "--through", served.url, "--json").ok().json
    blocks = [len(text) // BLOCK_TOKENS for text in texts]
    assert [each["stored_blocks"] for each in ran["prompts"]] == [*blocks, 0]
    distinct = {text[: end * BLOCK_TOKENS] for text in texts for end in range(1, len(text) // BLOCK_TOKENS + 1)}
    assert ran["gained"]["blocks"] == len(distinct) and ran["gained"]["tokens"] == len(distinct) * BLOCK_TOKENS
    assert 0 < ran["gained"]["bytes"] <= served.cli("usage", "--json").ok().json["namespaces"][0]["bytes"]
    assert ran["computed"] == 4 and not ran["errors"]
    again = served.cli(*warm, "--through", served.url, "--json").ok().json
    assert again["computed"] == 0 and again["gained"]["blocks"] == 0


def test_prefetch_brings_the_bucket_into_host_memory(served: Served, tmp_path: Path) -> None:
    prompts = lines(tmp_path, "p", {"prompt": SYSTEM + "to be fetched"})
    warm = ("warm", prompts, "--tokenizer", "bytes", "--json")
    served.cli(*warm, "--through", served.url).ok()
    served.cli("agent", "drain").ok()
    served.cli("agent", "forget").ok()
    assert served.cli(*warm).ok().json["prompts"][0]["resident_blocks"] == 0
    fetched = served.cli(*warm, "--prefetch").ok().json["prompts"][0]
    assert fetched["resident_blocks"] == fetched["blocks"] > 8


def test_case_8_keys_of_the_cli_and_of_the_connector_are_identical(served: Served, tmp_path: Path) -> None:
    """What the connector stored for tokens, salt and LoRA is found by just the same tokens, salt and LoRA."""
    tokens = [(number * 37) % 251 for number in range(10 * BLOCK_TOKENS)]
    plain = {"prompt_token_ids": tokens}
    salted, adapted = {**plain, "cache_salt": "tenant-a"}, {**plain, "lora": 7}
    both = {**plain, "cache_salt": "tenant-b", "lora": 7}
    for number, stored in enumerate((salted, adapted, both)):
        path = lines(tmp_path, f"stored{number}", stored)
        ran = served.cli("warm", path, "--through", served.url, "--json").ok().json
        assert ran["prompts"][0]["stored_blocks"] == 10
        others = [plain, {**plain, "cache_salt": "7"}, {**stored, "cache_salt": "tenant-c"}]
        checked = served.cli("warm", lines(tmp_path, f"others{number}", *others), "--check", "--json").ok().json
        assert [each["stored_blocks"] for each in checked["prompts"]] == [0, 0, 0]


def test_errors_of_single_prompts_are_listed_and_do_not_stop_the_rest(served: Served, tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        "mixed",
        {"prompt_token_ids": [1] * 40},
        {"nothing": 1},
        {"prompt_token_ids": [1, 2, 4294967295]},
        {"prompt_token_ids": [3] * 40, "lora": 99},
        {"prompt_token_ids": [259] * 100_000},
    )
    ran = served.cli("warm", path, "--through", served.url, "--json")
    assert ran.code == 1
    reasons = {each["source"].rpartition(":")[2]: each["reason"] for each in ran.json["errors"]}
    assert set(reasons) == {"2", "3", "4", "5"}
    assert "identity.adapters" in reasons["4"] and "the server answered 400" in reasons["5"]
    assert ran.json["prompts"][0]["stored_blocks"] == 2


def test_a_server_that_is_not_there_is_one_sentence(served: Served, tmp_path: Path) -> None:
    path = lines(tmp_path, "p", {"prompt_token_ids": [9] * 64})
    ran = served.cli("warm", path, "--through", "http://127.0.0.1:9")
    assert ran.code == 1 and ran.err == "s3kv: http://127.0.0.1:9 does not answer: no connection could be made\n"


@pytest.mark.slow
@pytest.mark.parametrize("server", ["moto_place", "seaweedfs_place"])
def test_agent_warm_and_top_on_servers(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    place: S3Place = request.getfixturevalue(server)
    path = lines(tmp_path, "p", {"prompt": SYSTEM + "one"}, {"prompt": SYSTEM + "two"})
    with sim_server(tmp_path, store=Cli.on(place)) as served:
        warm = ("warm", path, "--tokenizer", "bytes", "--json")
        done = served.cli(*warm, "--through", served.url).ok().json
        assert all(each["stored_blocks"] == each["blocks"] for each in done["prompts"])
        served.cli("agent", "forget").ok()
        fetched = served.cli(*warm, "--prefetch").ok().json
        assert all(each["resident_blocks"] == each["blocks"] for each in fetched["prompts"])
        assert served.cli("agent", "status", "--json").ok().json["totals"]["fetched_blocks"] > 0
        assert served.cli("top", "--interval", "0.05", "--json").ok().json["status"]["namespaces"]


def test_an_empty_bucket_says_what_is_needed(tmp_path: Path, served: Served) -> None:
    path = lines(tmp_path, "p", {"prompt": "x"})
    ran = served.cli("--store", f"file://{tmp_path}/empty", "warm", path, "--store", f"file://{tmp_path}/empty")
    assert ran.code == 1 and "no namespace yet" in ran.err
