"""The conformance suite: what every `Store` must do. Needs pytest and pytest-asyncio.

    class TestMyStore(StoreConformance):
        @pytest.fixture
        async def store(self): yield MyStore(...)

        @pytest.fixture
        def raw(self): return RawAccess(...)     # reads and writes past the code under test

A capability that a store lacks is declared by its `capabilities`; the cases that need it are skipped with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from typing import Protocol

import pytest

from s3kv.errors import AlreadyExists, CorruptData, NotFound, PreconditionFailed
from s3kv.store.base import Body, ObjectMeta, Store
from s3kv.store.keys import KEY_MAX_BYTES

ODD_KEYS = (
    "plus+plus",
    "equals=equals",
    "percent%percent",
    "encoded%2Fslash",
    "encoded%41",
    "a space",
    " leading and trailing ",
    "non-ascii-é-ü-日本語-🙂",
    "combining-e\u0301",
    "punctuation-~!@#$^&*()_{}[]|;:'\"<>,?`",
    "dots...and.more",
    ".hidden",
    "UPPER-and-lower",
    "colon:semi;amp&",
)
BAD_KEYS = (
    "",
    "/",
    "/lead",
    "trail/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "a/./b",
    "nul\0",
    "back\\slash",
    "line\n",
    "x" * 256,
    "\ud800",
)
CHUNK = 3 << 20
"""Larger than any threshold for copies in threads or multipart uploads' smallest part would notice at 1 MiB."""


class RawAccess(Protocol):
    """Objects read and written past the code under test; keys as the store's own."""

    def read(self, key: str) -> bytes: ...

    def write(self, key: str, data: bytes) -> None: ...

    def keys(self) -> list[str]: ...


def pattern(size: int, seed: str = "") -> bytes:
    """`size` bytes that differ everywhere."""
    return hashlib.shake_128(seed.encode()).digest(size)


async def all_entries(store: Store, prefix: str = "", start_after: str | None = None) -> list[ObjectMeta]:
    pages = [page async for page in store.list(prefix, start_after)]
    assert all(pages), "pages are not empty"
    return [meta for page in pages for meta in page]


async def all_keys(store: Store, prefix: str = "", start_after: str | None = None) -> list[str]:
    return [meta.key for meta in await all_entries(store, prefix, start_after)]


class StoreConformance:
    """Subclass it and provide the fixtures `store` and `raw`; the store begins empty.

    `cut_put_may_leave_empty` declares a fault of the server: it keeps an empty object when a connection closes between
    the header and the body of a put (SeaweedFS 4.48). Readers find it corrupt, and `put_once` replaces it.
    `orders_by_folder`: it lists `a/1` before `a-b`, by the folders' names without their slashes (SeaweedFS).
    """

    cut_put_may_leave_empty = False
    orders_by_folder = False

    async def test_put_get_whole(self, store: Store, raw: RawAccess) -> None:
        etag = await store.put("a/b", b"first")
        assert await store.get("a/b", 5) == b"first"
        assert await store.get_with_etag("a/b", 100) == (b"first", etag)
        assert raw.read("a/b") == b"first"

    async def test_put_replaces(self, store: Store) -> None:
        first = await store.put("k", b"first")
        second = await store.put("k", b"second")
        assert first != second
        assert await store.get("k", 100) == b"second"

    @pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "parts", "nothing", "empty parts"])
    async def test_bodies(self, store: Store, raw: RawAccess, kind: str) -> None:
        data = pattern(1000)
        empty: list[bytes] = [b"", b""]
        bodies: dict[str, tuple[Body, bytes]] = {
            "bytes": (data, data),
            "bytearray": (bytearray(data), data),
            "memoryview": (memoryview(bytearray(data))[100:900], data[100:900]),
            "parts": ([data[:10], b"", bytearray(data[10:500]), memoryview(data)[500:]], data),
            "nothing": (b"", b""),
            "empty parts": (empty, b""),
        }
        body, expected = bodies[kind]
        await store.put("k", body)
        assert raw.read("k") == expected
        assert (await store.head("k")).size == len(expected)

    async def test_large_objects(self, store: Store, raw: RawAccess) -> None:
        data = pattern(CHUNK)
        await store.put_if_absent("big", [memoryview(data)[: CHUNK // 3], memoryview(data)[CHUNK // 3 :]])
        assert raw.read("big") == data
        out = bytearray(CHUNK)
        assert await store.get_into("big", memoryview(out)) == CHUNK
        assert out == data
        assert await store.get("big", CHUNK) == data

    async def test_reads_objects_that_others_wrote(self, store: Store, raw: RawAccess) -> None:
        raw.write("from/elsewhere", b"theirs")
        assert await store.get("from/elsewhere", 10) == b"theirs"
        assert await all_keys(store) == ["from/elsewhere"]

    async def test_get_into_a_part(self, store: Store) -> None:
        await store.put("k", b"0123456789")
        slot = bytearray(b"........")
        assert await store.get_into("k", memoryview(slot)[2:6], 3) == 4
        assert slot == b"..3456.."

    async def test_get_into_nothing(self, store: Store) -> None:
        assert await store.get_into("missing", memoryview(bytearray())) == 0

    @pytest.mark.parametrize(("offset", "length"), [(0, 11), (8, 3), (10, 1), (1000, 5)])
    async def test_get_past_the_end_is_corrupt(self, store: Store, offset: int, length: int) -> None:
        await store.put("k", b"0123456789")
        with pytest.raises(CorruptData):
            await store.get_into("k", memoryview(bytearray(length)), offset)
        with pytest.raises(CorruptData):
            await store.get_ranges("k", [(0, 2), (offset, length)], _outs(2, length))

    async def test_get_ranges(self, store: Store) -> None:
        data = pattern(300_000)
        await store.put("k", data)
        ranges = [(200_000, 1000), (0, 10), (5, 10), (299_999, 1), (100, 0)]
        outs = _outs(*(length for _, length in ranges))
        await store.get_ranges("k", ranges, outs)
        assert [bytes(out) for out in outs] == [data[at : at + length] for at, length in ranges]

    async def test_get_ranges_that_do_not_fit(self, store: Store) -> None:
        await store.put("k", b"0123456789")
        for ranges, outs in (([(0, 2)], _outs(3)), ([(0, 2)], []), ([(-1, 2)], _outs(2))):
            with pytest.raises(ValueError):
                await store.get_ranges("k", ranges, outs)
        with pytest.raises(ValueError):
            await store.get_into("k", memoryview(b"read-only"))
        with pytest.raises(ValueError):
            await store.get_into("k", memoryview(bytearray(2)), -1)

    async def test_get_larger_than_allowed(self, store: Store) -> None:
        await store.put("k", b"0123456789")
        with pytest.raises(CorruptData):
            await store.get("k", 9)
        with pytest.raises(CorruptData):
            await store.get_with_etag("k", 9)

    async def test_missing(self, store: Store) -> None:
        for call in (
            store.get("nope/x", 10),
            store.get_with_etag("nope/x", 10),
            store.head("nope/x"),
            store.get_into("nope/x", memoryview(bytearray(1))),
            store.get_ranges("nope/x", [(0, 1)], _outs(1)),
        ):
            with pytest.raises(NotFound):
                await call

    async def test_head(self, store: Store) -> None:
        etag = await store.put("k", b"12345")
        meta = await store.head("k")
        assert (meta.key, meta.size, meta.etag) == ("k", 5, etag)
        assert (await all_entries(store))[0].etag == etag
        assert meta.modified > 1.7e9

    async def test_put_if_absent(self, store: Store, raw: RawAccess) -> None:
        etag = await store.put_if_absent("k", b"first")
        with pytest.raises(AlreadyExists):
            await store.put_if_absent("k", b"second")
        assert await store.get_with_etag("k", 10) == (b"first", etag)
        await store.delete(["k"])
        await store.put_if_absent("k", [b"th", b"ird"])
        assert raw.read("k") == b"third"

    async def test_racing_put_if_absent_has_one_winner(self, store: Store) -> None:
        await store.put_if_absent("first", b"")
        if not store.capabilities.conditional_put:
            pytest.skip("the store has no conditional put")
        results = await asyncio.gather(
            *(store.put_if_absent("k", f"writer {i}".encode()) for i in range(12)), return_exceptions=True
        )
        winners = [i for i, result in enumerate(results) if isinstance(result, str)]
        assert len(winners) == 1
        assert all(isinstance(r, str | AlreadyExists) for r in results), results
        assert await store.get("k", 100) == f"writer {winners[0]}".encode()

    async def test_put_if_match(self, store: Store) -> None:
        first = await store.put_if_absent("lease", b"1")
        second = await store.put_if_match("lease", b"22", first)
        assert second != first
        with pytest.raises(PreconditionFailed):
            await store.put_if_match("lease", b"333", first)
        assert await store.get_with_etag("lease", 10) == (b"22", second)
        await store.delete(["lease"])
        with pytest.raises(PreconditionFailed):
            await store.put_if_match("lease", b"4444", second)
        with pytest.raises(NotFound):
            await store.head("lease")

    async def test_racing_put_if_match_has_one_winner(self, store: Store) -> None:
        etag = await store.put("lease", b"0")
        etag = await store.put_if_match("lease", b"1", etag)
        if not store.capabilities.conditional_match:
            pytest.skip("the store has no conditional put by etag")
        results = await asyncio.gather(
            *(store.put_if_match("lease", f"writer {i}".encode(), etag) for i in range(8)), return_exceptions=True
        )
        winners = [i for i, result in enumerate(results) if isinstance(result, str)]
        assert len(winners) == 1
        assert all(isinstance(r, str | PreconditionFailed) for r in results), results
        assert await store.get("lease", 100) == f"writer {winners[0]}".encode()

    async def test_list_order_prefix_and_start_after(self, store: Store) -> None:
        keys = ["a/1", "a/2/x", "a/10", "b", "a0", "é/z", "a/3!"]
        if not self.orders_by_folder:
            keys += ["a-b", "a.b", "a/2!"]
        for key in keys:
            await store.put(key, key.encode())
        ordered = sorted(keys, key=lambda key: key.encode())
        entries = await all_entries(store)
        assert [meta.key for meta in entries] == ordered
        assert [meta.size for meta in entries] == [len(key.encode()) for key in ordered]
        assert await all_keys(store, "a/") == [key for key in ordered if key.startswith("a/")]
        assert await all_keys(store, "a/2/") == ["a/2/x"]
        assert await all_keys(store, "nothing/") == []
        folders = [] if self.orders_by_folder else ["a", "a/2"]
        for after in [*ordered, *folders, "a/15", "zzz", "Z"]:
            assert await all_keys(store, "", after) == [key for key in ordered if key > after], after
            below = [key for key in ordered if key > after and key.startswith("a/")]
            assert await all_keys(store, "a/", after) == below, after

    async def test_list_prefixes(self, store: Store) -> None:
        for key in ("top", "ns/one/a", "ns/one/b/c", "ns/two/a", "ns/file", "ns+/x"):
            await store.put(key, b"")
        assert await store.list_prefixes("") == ["ns+/", "ns/"]
        assert await store.list_prefixes("ns/") == ["ns/one/", "ns/two/"]
        assert await store.list_prefixes("ns/one/") == ["ns/one/b/"]
        assert await store.list_prefixes("none/") == []

    async def test_delete(self, store: Store, raw: RawAccess) -> None:
        for key in ("a/1", "a/2", "b"):
            await store.put(key, b"x")
        assert await store.delete([]) == []
        assert await store.delete(["a/1", "missing/key", "b"]) == []
        assert raw.keys() == ["a/2"]
        assert await store.delete(["a/2"]) == []
        assert await store.delete(["a/2"]) == []
        assert await all_keys(store) == []

    @pytest.mark.parametrize("key", ODD_KEYS)
    async def test_odd_keys_survive(self, store: Store, raw: RawAccess, key: str) -> None:
        for each in (key, f"folder {key}/{key}"):
            await store.put(each, key.encode())
            assert raw.read(each) == key.encode()
            assert await store.get(each, 1000) == key.encode()
            assert (await store.head(each)).key == each
        assert await all_keys(store, f"folder {key}/") == [f"folder {key}/{key}"]
        assert f"folder {key}/" in await store.list_prefixes("")
        assert sorted(await all_keys(store)) == sorted(raw.keys())
        assert await store.delete([key, f"folder {key}/{key}"]) == []
        assert raw.keys() == []

    @pytest.mark.parametrize("key", BAD_KEYS)
    async def test_bad_keys_are_refused(self, store: Store, key: str) -> None:
        for call in (
            store.get(key, 1),
            store.get_into(key, memoryview(bytearray(1))),
            store.put(key, b""),
            store.put_if_absent(key, b""),
            store.put_if_match(key, b"", "etag"),
            store.head(key),
            store.delete(["fine", key]),
        ):
            with pytest.raises(ValueError):
                await call

    async def test_bad_prefixes_are_refused(self, store: Store) -> None:
        with pytest.raises(ValueError):
            await all_keys(store, "", "a/")
        for prefix in ("a", "/", "a//", "../"):
            with pytest.raises(ValueError):
                await all_keys(store, prefix)
            with pytest.raises(ValueError):
                await store.list_prefixes(prefix)

    async def test_long_keys(self, store: Store) -> None:
        key = "/".join(["p" * 100] * 9)
        assert len(key) < KEY_MAX_BYTES
        await store.put(key, b"x")
        assert await all_keys(store) == [key]

    async def test_many_calls_at_once(self, store: Store) -> None:
        data = {f"k/{i}": pattern(20_000, str(i)) for i in range(64)}
        await asyncio.gather(*(store.put(key, value) for key, value in data.items()))
        outs = {key: bytearray(20_000) for key in data}
        await asyncio.gather(*(store.get_into(key, memoryview(out)) for key, out in outs.items()))
        assert outs == data

    async def test_cancelled_put_leaves_whole_or_nothing(self, store: Store) -> None:
        """And the buffer is the caller's again: it is overwritten at once, and no mixture is stored."""
        before, after = pattern(CHUNK, "before"), bytes(CHUNK)
        for delay_s in (0.0, 0.001, 0.003, 0.01):
            body = bytearray(before)
            task = asyncio.ensure_future(store.put("k", body))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.wait([task])
            body[:] = after
            with contextlib.suppress(NotFound):
                data = await store.get("k", CHUNK)
                assert data == before or (self.cut_put_may_leave_empty and not data)
            await store.delete(["k"])

    async def test_cancelled_get_leaves_the_buffer_alone(self, store: Store) -> None:
        await store.put("k", bytes(CHUNK))
        for delay_s in (0.0, 0.001, 0.003):
            slot = bytearray(CHUNK)
            task = asyncio.ensure_future(store.get_into("k", memoryview(slot)))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.wait([task])
            slot[:] = b"\xff" * CHUNK  # the next user's bytes
            await asyncio.sleep(0.01)
            assert slot.count(b"\xff") == CHUNK

    async def test_close_may_be_repeated(self, store: Store) -> None:
        await store.put("k", b"x")
        await store.close()
        await store.close()


def _outs(*sizes: int) -> Sequence[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]
