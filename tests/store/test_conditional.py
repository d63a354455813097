"""Stores that honour, refuse or silently ignore conditional puts; objects made by put and by multipart."""

from __future__ import annotations

import asyncio
import logging

import pytest
from support.faulty_proxy import Fault, Request, faulty_proxy, s3_error
from support.servers import S3Place

from s3kv.errors import AlreadyExists, PreconditionFailed, Transient, Unsupported
from s3kv.store import open_store
from s3kv.store.base import Body
from s3kv.store.conditional import ConditionalStore
from s3kv.store.faults import Fault as StoreFault
from s3kv.store.faults import FaultPlan, FaultStore
from s3kv.store.immutable import put_once
from s3kv.store.memory import MemoryStore
from s3kv.store.testing import all_keys

both = pytest.mark.parametrize("client", ["obstore", "aioboto3"])


class Ignoring(MemoryStore):
    """Takes the headers and does not look at them, like rclone, nanio and s3rver."""

    async def put_if_absent(self, key: str, body: Body) -> str:
        return await self.put(key, body)

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        return await self.put(key, body)


class Refusing(MemoryStore):
    """501, like Swift."""

    async def put_if_absent(self, key: str, body: Body) -> str:
        raise Unsupported("501")

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        raise Unsupported("501")


class HalfExact(MemoryStore):
    """Compares etags in its own way, so that the right one never fits, like radosgw 16."""

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        raise PreconditionFailed("never")


@pytest.mark.parametrize(
    ("inner", "absent", "match"),
    [(MemoryStore, True, True), (Ignoring, False, False), (Refusing, False, False), (HalfExact, True, False)],
)
async def test_what_a_store_honours_is_detected_once(
    inner: type[MemoryStore], absent: bool, match: bool, caplog: pytest.LogCaptureFixture
) -> None:
    raw = inner()
    store = ConditionalStore(raw, "auto")
    assert store.capabilities.conditional_put is None
    await asyncio.gather(*(store.put_if_absent(f"k{i}", b"first") for i in range(5)))
    assert (store.capabilities.conditional_put, store.capabilities.conditional_match) == (absent, match)
    assert await all_keys(raw) == [f"k{i}" for i in range(5)], "the scratch object is gone"
    assert len(caplog.records) == (0 if absent and match else 1)

    with pytest.raises(AlreadyExists):
        await store.put_if_absent("k0", b"second")
    etag = await store.put("lease", b"1")
    await store.put_if_match("lease", b"2", etag)
    with pytest.raises(PreconditionFailed):
        await store.put_if_match("lease", b"3", etag)
    with pytest.raises(PreconditionFailed):
        await store.put_if_match("missing", b"3", etag)
    assert await store.get("lease", 9) == b"2"


async def test_none_never_sends_the_headers() -> None:
    store = ConditionalStore(Refusing(), "none")
    await store.put_if_absent("k", b"x")
    assert await all_keys(store) == ["k"]


async def test_native_trusts_the_store() -> None:
    with pytest.raises(Unsupported):
        await ConditionalStore(Refusing(), "native").put_if_absent("k", b"x")


async def test_a_store_that_cannot_be_asked_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan()
    plan.expect("put", StoreFault.ERROR_BEFORE)
    store = ConditionalStore(FaultStore(MemoryStore(), plan), "auto")
    with pytest.raises(Transient):
        await store.put_if_absent("k", b"x")
    assert store.capabilities.conditional_put is None
    await store.put_if_absent("k", b"x")
    assert store.capabilities.conditional_put
    assert caplog.records == []


@both
@pytest.mark.parametrize("how", ["refuses", "ignores"])
async def test_detection_over_http(moto_place: S3Place, client: str, how: str) -> None:
    def rule(request: Request) -> Fault | None:
        conditional = {"if-none-match", "if-match"} & request.headers.keys()
        if how == "refuses" and conditional:
            return s3_error(501, "NotImplemented")
        for name in conditional:
            del request.headers[name]  # moto checks no signature
        return None

    with faulty_proxy(moto_place.endpoint) as proxy:
        proxy.rule(rule)
        store = open_store(moto_place.settings(client=client, endpoint=proxy.endpoint))
        await store.put_if_absent("k", b"x")
        with pytest.raises(AlreadyExists):
            await store.put_if_absent("k", b"y")
        assert store.capabilities.conditional_put is False
        assert await store.list_prefixes("") == [], "nothing stays"
        await store.close()


@both
@pytest.mark.parametrize("server", ["moto_place", "seaweedfs_place"])
async def test_case_52_conditional_puts_on_objects_made_by_multipart(
    request: pytest.FixtureRequest, client: str, server: str
) -> None:
    place: S3Place = request.getfixturevalue(server)
    raw, name = place.client(), {"Bucket": place.bucket, "Key": f"{place.prefix}/k"}
    upload = raw.create_multipart_upload(**name)["UploadId"]
    bodies = [b"a" * (5 << 20), b"b"]
    parts = [
        {"PartNumber": i, "ETag": raw.upload_part(**name, UploadId=upload, PartNumber=i, Body=body)["ETag"]}
        for i, body in enumerate(bodies, 1)
    ]
    raw.complete_multipart_upload(**name, UploadId=upload, MultipartUpload={"Parts": parts})

    store = open_store(place.settings(client=client, conditional_put="native"))
    with pytest.raises(AlreadyExists):
        await store.put_if_absent("k", b"mine")
    etag = (await store.head("k")).etag
    assert "-2" in etag, "an etag of a multipart object"
    with pytest.raises(PreconditionFailed):
        await store.put_if_match("k", b"mine", '"wrong"')
    newer = await store.put_if_match("k", b"mine", etag)
    with pytest.raises(PreconditionFailed):
        await store.put_if_match("k", b"again", etag)
    assert await store.get_with_etag("k", 10) == (b"mine", newer)
    await store.close()


async def test_put_once_keeps_the_first_and_replaces_what_a_cut_put_left() -> None:
    store = MemoryStore()
    assert await put_once(store, "k", b"content")
    assert not await put_once(store, "k", b"as good")
    assert await store.get("k", 100) == b"content"
    await store.put("cut", b"")
    assert await put_once(store, "cut", b"content")
    assert await store.get("cut", 100) == b"content"


def test_the_warning_names_both_headers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(ConditionalStore(HalfExact(), "auto").put_if_absent("k", b"x"))
    assert "If-None-Match: yes, If-Match: no" in caplog.text
