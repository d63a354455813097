from __future__ import annotations

import dataclasses

import pytest

from s3kv.errors import CorruptData
from s3kv.identity import REPLICATED, GroupSpec, NamespaceSpec, Part, RegionSpec

KEY, SCALE = (0, "key", 0), (0, "key_scale", 0)
FULL = GroupSpec((0, 1), None, (RegionSpec(1000, buffers=(KEY,)),))
WINDOW = GroupSpec((2,), 64, (RegionSpec(500),))
BASE = NamespaceSpec("m", "w", "bfloat16", 32, (FULL, WINDOW), shards=2)


def test_json_round_trip_keeps_the_identity() -> None:
    assert NamespaceSpec.from_json(BASE.to_json()) == BASE
    assert len(BASE.digest) == 32
    assert BASE.name == BASE.digest[:16].hex()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"weights": "revision 2"},
        {"kv_dtype": "float16"},
        {"quantization": "fp8"},
        {"tokens_per_block": 64},
        {"shards": 4},
        {"format": 2},
        {"groups": (FULL, dataclasses.replace(WINDOW, window=128))},
        {"groups": (FULL, dataclasses.replace(WINDOW, layers=(3,)))},
        {"groups": (WINDOW, FULL)},
        {"groups": (FULL, GroupSpec((2,), 64, (RegionSpec(500, replicated=True),)))},
        {"groups": (dataclasses.replace(FULL, regions=(RegionSpec(1000, buffers=(SCALE,)),)), WINDOW)},
        {"extra": (("rope", "yarn"),)},
    ],
)
def test_case_14_any_difference_is_another_namespace(change: dict[str, object]) -> None:
    other = dataclasses.replace(BASE, **change)  # type: ignore[arg-type]
    assert other.digest != BASE.digest
    assert other.name != BASE.name


def test_case_12_names_that_look_alike_when_joined_differ() -> None:
    a = dataclasses.replace(BASE, model="a/b_c", weights="")
    b = dataclasses.replace(BASE, model="a_b/c", weights="")
    assert a.name != b.name
    assert (
        dataclasses.replace(BASE, model="ab", weights="c").name
        != dataclasses.replace(BASE, model="a", weights="bc").name
    )


def test_names_are_safe_in_paths_and_keys() -> None:
    hostile = dataclasses.replace(BASE, model="../../etc/passwd\n %00é")
    assert set(hostile.name) <= set("0123456789abcdef")


def test_parts_are_one_for_each_shard_and_one_for_what_is_replicated() -> None:
    mixed = GroupSpec((0,), None, (RegionSpec(1000), RegionSpec(24, replicated=True)))
    spec = NamespaceSpec("m", "w", "bfloat16", 32, (mixed, WINDOW), shards=2)
    assert spec.parts == (Part(0, (1000, 500)), Part(1, (1000, 500)), Part(REPLICATED, (24, 0)))
    assert [spec.parts[0].group_offset(group) for group in (0, 1)] == [0, 1024]
    assert spec.parts[0].slot_bytes == 4096


def test_case_18_replicated_bytes_alone_are_unsharded() -> None:
    latent = GroupSpec((0,), None, (RegionSpec(576, replicated=True),))
    spec = NamespaceSpec("mla", "w", "bfloat16", 32, (latent,))
    assert [part.shard for part in spec.parts] == [REPLICATED]
    with pytest.raises(ValueError, match="unsharded"):
        NamespaceSpec("mla", "w", "bfloat16", 32, (latent,), shards=2)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        BASE.to_json() + b" ",
        BASE.to_json().replace(b"1000", b"-1"),
        BASE.to_json().replace(b'"shards":2', b'"shards":2,"shards":3'),
        BASE.to_json().replace(b'"window":64', b'"window":"x"'),
        b"x" * (2 << 20),
        BASE.to_json().replace(b'"window":64', b'"window":Infinity'),
        BASE.to_json().replace(b'"layers":[2]', b'"layers":[1e999]'),
        BASE.to_json().replace(b'"layers":[2]', b'"layers":[2.0]'),
        BASE.to_json().replace(b'"shards":2', b'"shards":2.0'),
        BASE.to_json().replace(b'"shards":2', b'"shards":true'),
        BASE.to_json().replace(b'"kv_dtype":"bfloat16"', b'"kv_dtype":[]'),
        BASE.to_json().replace(b'"model":"m"', b'"model":5'),
        BASE.to_json().replace(b'"model":"m"', b'"model":"m","more":1'),
    ],
)
def test_hostile_descriptions_are_corrupt_data(data: bytes) -> None:
    with pytest.raises(CorruptData):
        NamespaceSpec.from_json(data)
