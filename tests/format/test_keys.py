"""Keys: what is built is parsed back, order of keys is order of time, and nobody else's key is taken for ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.format_values import ids, u32, u64

from s3kv.format import keys

NAME = "0123456789abcdef" * 2


@given(ids, st.integers(0, 63), u64, u32, u32, u64)
def test_every_key_is_parsed_back(chunk: bytes, group: int, time_us: int, agent: int, seq: int, epoch: int) -> None:
    assert keys.parse_chunk_key(keys.chunk_key(NAME, chunk, group)) == (NAME, chunk, group)
    assert keys.parse_log_key(keys.log_key(NAME, time_us, agent, seq)) == (NAME, time_us, agent, seq)
    assert keys.parse_snap_key(keys.snap_key(NAME, time_us, epoch)) == (NAME, time_us, epoch)
    assert keys.parse_namespace_key(keys.namespace_key(NAME)) == NAME
    assert keys.parse_lease_key(keys.lease_key(f"gc-{NAME}")) == f"gc-{NAME}"


def test_layout_is_the_documented_one() -> None:
    chunk = bytes.fromhex("fe" + "01" * 15)
    assert keys.chunk_key(NAME, chunk, 2) == f"ns/{NAME}/chunk/fe/fe{'01' * 15}/g2"
    assert keys.log_key(NAME, 0x1A, 0x2B, 3) == f"ns/{NAME}/log/000000000000001a-0000002b-00000003"
    assert keys.snap_key(NAME, 0x1A, 5) == f"ns/{NAME}/snap/000000000000001a-0000000000000005"
    assert keys.namespace_key(NAME) == f"ns/{NAME}/namespace.json"
    assert keys.lease_key("gc") == "lease/gc"


@given(u64, u64, u32, u32)
def test_log_keys_sort_by_time_and_start_after_excludes_nothing_of_its_time(
    a: int, b: int, agent: int, seq: int
) -> None:
    first, second = keys.log_key(NAME, a, agent, seq), keys.log_key(NAME, b, agent, seq)
    assert (first < second) == (a < b)
    start = keys.log_start_after(NAME, a)
    assert start < keys.log_key(NAME, a, 0, 0)
    assert a == 0 or start > keys.log_key(NAME, a - 1, 0xFFFFFFFF, 0xFFFFFFFF)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "ns/",
        f"ns/{NAME}/chunk/fe/fe{'01' * 15}/g64",
        f"ns/{NAME}/chunk/fe/fe{'01' * 15}/g02",
        f"ns/{NAME}/chunk/fe/fe{'01' * 15}/g²",
        f"ns/{NAME}/chunk/fe/fe{'01' * 15}/g1\n",
        f"ns/{NAME}/chunk/aa/fe{'01' * 15}/g1",
        f"ns/{NAME.upper()}/chunk/fe/fe{'01' * 15}/g1",
        f"ns/{NAME}/../{NAME}/chunk/fe/fe{'01' * 15}/g1",
        f"/ns/{NAME}/chunk/fe/fe{'01' * 15}/g1",
        f"ns/{NAME}/log/1a-2b-3",
        f"ns/{NAME}/log/٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠-00000000-00000000",
        f"ns/{NAME}/snap/000000000000001a",
        "lease/",
        "lease/../x",
        "lease/a/b",
        "\ud800",
    ],
)
def test_foreign_and_hostile_keys_are_none(key: str) -> None:
    parsers = (keys.parse_chunk_key, keys.parse_log_key, keys.parse_snap_key, keys.parse_lease_key)
    assert [parse(key) for parse in (*parsers, keys.parse_namespace_key)] == [None] * 5


def test_builders_refuse_what_no_parser_would_take() -> None:
    for build in (
        lambda: keys.chunk_key("../..", bytes(16), 0),
        lambda: keys.chunk_key(NAME, bytes(15), 0),
        lambda: keys.chunk_key(NAME, bytes(16), 64),
        lambda: keys.log_key(NAME, -1, 0, 0),
        lambda: keys.log_key(NAME, 0, 1 << 32, 0),
        lambda: keys.snap_key(NAME, 1 << 64, 0),
        lambda: keys.lease_key("a/b"),
    ):
        with pytest.raises(ValueError):
            build()
