"""Names of keys and `store.url`."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3kv.errors import ConfigError
from s3kv.settings import StoreSettings
from s3kv.store import open_store
from s3kv.store.keys import Location, parse_url, why_bad_key
from s3kv.store.local import LocalStore
from s3kv.store.spans import plan_spans
from s3kv.store.testing import all_keys


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket", Location("s3", "bucket", "")),
        ("s3://bucket/", Location("s3", "bucket", "")),
        ("s3://bucket/a/b/", Location("s3", "bucket", "a/b")),
        ("s3://bucket/a+b %20=é?#x", Location("s3", "bucket", "a+b %20=é?#x")),
        ("file:///srv/cache", Location("file", "/srv/cache", "")),
        ("file:///srv/my %20 cache", Location("file", "/srv/my %20 cache", "")),
        ("memory://", Location("memory", "", "")),
        ("memory://name", Location("memory", "name", "")),
    ],
)
def test_urls_are_taken_as_they_stand(url: str, location: Location) -> None:
    assert parse_url(url) == location


@pytest.mark.parametrize(
    "url",
    [
        *("", "bucket", "/folder", "http://x/y", "s3://", "s3:///prefix", "s3://buc ket/x", "s3://user@bucket/x"),
        *("s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/" + "p" * 600, "s3://bucket/a\\b"),
        *("file://", "file:///", "file://host/folder", "file://relative", "file:///a/../b"),
    ],
)
def test_other_urls_are_refused_in_one_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url \(or S3KV_STORE__URL\)") as caught:
        open_store(StoreSettings(url=url))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"access_key_id": "only"},
        {"secret_access_key": "only"},
        {"ca_bundle": "/nonexistent/ca.pem"},
        {"ca_bundle": __file__},
    ],
)
def test_other_s3_settings_are_refused_in_one_sentence(values: dict[str, str]) -> None:
    (name,) = values
    with pytest.raises(ConfigError, match=rf"store\.{name} \(or S3KV_STORE__{name.upper()}\)"):
        open_store(StoreSettings(url="s3://bucket/p", **values))  # type: ignore[arg-type]


def test_the_files_of_a_folder_store_are_no_keys_and_say_so() -> None:
    for key in (".s3kv", ".s3kv/lock"):
        assert "where a folder store keeps files of its own" in (why_bad_key(key) or "")
    assert why_bad_key("ns/.s3kv") is None and why_bad_key(".s3kvx") is None
    assert parse_url("s3://bucket/.s3kv").prefix == ".s3kv", "where the bucket's own keys begin is another matter"


@settings(max_examples=15)
@given(st.text(min_size=1, max_size=40))
def test_every_key_that_is_not_refused_survives_in_a_folder(key: str) -> None:
    if why_bad_key(key) is not None:
        return

    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            store = LocalStore(Path(folder))
            await store.put(key, key.encode())
            assert await all_keys(store) == [key]
            assert await store.get(key, 1000) == key.encode()
            await store.close()

    asyncio.run(main())


ranges_strategy = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300)), max_size=20)


@given(ranges_strategy, st.integers(0, 200), st.integers(1, 1000))
def test_spans_cover_each_range_once(ranges: list[tuple[int, int]], gap: int, most: int) -> None:
    spans = plan_spans(ranges, gap, most)
    members = sorted(index for span in spans for index in span.members)
    assert members == [index for index, (_, length) in enumerate(ranges) if length]
    for span in spans:
        inside = [(ranges[i][0], sum(ranges[i])) for i in span.members]
        assert span.start == min(start for start, _ in inside) and span.end == max(end for _, end in inside)
        assert span.end - span.start <= max(most, *(end - start for start, end in inside))
        covered = span.start
        for start, end in sorted(inside):
            assert start - covered <= gap
            covered = max(covered, end)


def test_neighbours_are_read_together_and_far_ones_apart() -> None:
    spans = plan_spans([(0, 10), (5000, 10), (12, 8)], gap_bytes=5, span_bytes=1000)
    assert [(span.start, span.end, span.members) for span in spans] == [(0, 20, (0, 2)), (5000, 5010, (1,))]
