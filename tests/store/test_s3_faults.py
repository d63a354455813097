"""Field reports about S3 clients, over a proxy that does what was reported. Both clients, unless said."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from support.faulty_proxy import SLOW_DOWN, Fault, Request, s3_error
from support.opener import Opener

from s3kv.errors import (
    CorruptData,
    NotFound,
    PermissionDenied,
    StoreError,
    Transient,
    Unsupported,
)
from s3kv.store import describe_failure
from s3kv.store.testing import all_keys, pattern

both = pytest.mark.parametrize("client", ["obstore", "aioboto3"])


def strict_store(request: Request) -> Fault | None:
    """A store that refuses chunked signatures, checksum headers, and a bulk delete without Content-MD5."""
    if "aws-chunked" in request.headers.get("content-encoding", ""):
        return s3_error(501, "NotImplemented")
    if request.headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
        return s3_error(501, "NotImplemented")
    if any(name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum", "x-amz-trailer")) for name in request.headers):
        return s3_error(400, "InvalidArgument")
    if request.method == "POST" and "delete" in request.target and "content-md5" not in request.headers:
        return s3_error(400, "MissingContentMD5")
    return None


@both
@pytest.mark.parametrize("signing", ["always", "never"])
async def test_case_35_documented_settings_satisfy_a_strict_store(opened: Opener, client: str, signing: str) -> None:
    opened.proxy.rule(strict_store)
    store = opened(client=client, checksums="when_required", delete_mode="single", payload_signing=signing)
    await store.put_if_absent("k", [b"parts ", b"of it"])
    await store.put("k2", pattern(100_000))
    assert await store.get("k", 100) == b"parts of it"
    assert await store.delete(["k", "k2", "missing"]) == []
    assert await all_keys(store) == []


@both
async def test_case_35_a_refused_bulk_delete_names_the_setting(opened: Opener, client: str) -> None:
    opened.proxy.inject(s3_error(400, "MissingContentMD5"), times=None, method="POST")
    store = opened(client=client)
    await store.put("k", b"x")
    with pytest.raises(Unsupported) as caught:
        await store.delete(["k"])
    assert "store.delete_mode" in describe_failure(caught.value, opened.place.settings())


@both
async def test_case_36_path_style_with_an_endpoint(opened: Opener, client: str) -> None:
    store = opened(client=client)
    await store.put("folder/k", b"x")
    await store.get("folder/k", 1)
    await store.head("folder/k")
    await all_keys(store, "folder/")
    await store.delete(["folder/k"])
    bucket = opened.place.bucket
    assert {request.method for request in opened.proxy.seen} >= {"PUT", "GET", "HEAD", "POST"}
    assert all(
        request.path in (f"/{bucket}", f"/{bucket}/") or request.path.startswith(f"/{bucket}/")
        for request in opened.proxy.seen
    )


@both
@pytest.mark.parametrize("kind", ["truncate", "reset_body"])
async def test_case_37_a_cut_body_is_fetched_again(opened: Opener, client: str, kind: Any) -> None:
    store = opened(client=client)
    data = pattern(10_000)
    await store.put("k", data)
    opened.proxy.inject(Fault(kind, count=4_000), method="GET", times=2)
    slot = bytearray(10_000)
    await store.get_into("k", memoryview(slot))
    assert slot == data
    opened.proxy.inject(Fault(kind, count=4_000), method="GET")
    assert await store.get("k", 10_000) == data


@both
async def test_case_37_a_body_that_is_always_cut_is_an_error(opened: Opener, client: str) -> None:
    store = opened(client=client, retries=2)
    await store.put("k", pattern(10_000))
    opened.proxy.inject(Fault("truncate", count=4_000), method="GET", times=None)
    before = opened.proxy.count("GET")
    with pytest.raises(Transient):
        await store.get_into("k", memoryview(bytearray(10_000)))
    assert opened.proxy.count("GET") - before == 3


@both
@pytest.mark.parametrize("kind", ["longer", "shorter"])
async def test_case_37_a_wrong_length_never_gives_wrong_bytes(opened: Opener, client: str, kind: Any) -> None:
    store = opened(client=client, retries=1, request_timeout_s=3.0)
    data, slot = pattern(10_000), bytearray(10_000)
    await store.put("k", data)
    opened.proxy.inject(Fault(kind, count=100), method="GET", times=None)
    try:
        await store.get_into("k", memoryview(slot))
    except (Transient, CorruptData):
        return
    assert kind == "longer" and slot == data, "every byte came although the header was wrong"


@both
async def test_case_39_sixty_four_transfers_at_once(
    opened: Opener, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(client=client, max_connections=64)
    opened.proxy.inject(Fault("delay", seconds=0.05), times=None)
    with caplog.at_level(logging.DEBUG):
        await asyncio.gather(*(store.put(f"k{i}", pattern(1000, str(i))) for i in range(64)))
        got = await asyncio.gather(*(store.get(f"k{i}", 1000) for i in range(64)))
    assert got == [pattern(1000, str(i)) for i in range(64)]
    assert opened.proxy.peak_connections <= 65
    assert not [
        record for record in caplog.records if "pool" in record.message.lower() and record.levelno >= logging.WARNING
    ]


@both
async def test_case_40_expired_credentials_are_replaced(
    opened: Opener, client: str, tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    """Keys from a process, each good for a second: every later request is signed with new ones."""
    counter, script = tmp_path / "count", tmp_path / "keys.py"
    counter.write_text("0")
    script.write_text(CREDENTIAL_PROCESS)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {sys.executable} {script} {counter}\n")
    clean_environment.setenv("AWS_CONFIG_FILE", str(config))
    clean_environment.delenv("AWS_ACCESS_KEY_ID")
    clean_environment.delenv("AWS_SECRET_ACCESS_KEY")
    opened.proxy.inject(Fault("status", 200, b"", {"etag": '"e"'}), times=None)
    store = opened(client=client, access_key_id=None, secret_access_key=None)
    for _ in range(2):
        await store.put("k", b"x")
        await asyncio.sleep(1.1)
    used = [
        request.headers["authorization"].partition("Credential=")[2].partition("/")[0] for request in opened.proxy.seen
    ]
    assert len(used) == 2 and used[0] != used[1], used


CREDENTIAL_PROCESS = """
import datetime, json, pathlib, sys
counter = pathlib.Path(sys.argv[1])
number = int(counter.read_text()) + 1
counter.write_text(str(number))
expires = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)).isoformat()
print(json.dumps({"Version": 1, "AccessKeyId": f"key{number}", "SecretAccessKey": "s", "Expiration": expires}))
"""


@both
@pytest.mark.parametrize(
    "fault",
    [SLOW_DOWN, s3_error(429, "TooManyRequests"), s3_error(500, "InternalError"), Fault("reset"), Fault("lose")],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
async def test_case_42_bursts_are_ridden_out(opened: Opener, client: str, fault: Fault) -> None:
    store = opened(client=client)
    opened.proxy.inject(fault, times=3)
    await store.put("k", b"x")
    assert opened.proxy.count("PUT") == 4
    opened.proxy.inject(fault, times=3)
    assert await store.get("k", 1) == b"x"


@both
async def test_case_43_directory_buckets(opened: Opener, client: str) -> None:
    """Their listings have prefixes that end with "/", no start-after, and no order of their own."""
    opened.proxy.inject(
        Fault("status", 200, EXPRESS_SESSION, {"content-type": "application/xml"}), times=None, contains="session"
    )
    entries = "".join(
        f"<Contents><Key>p/log/{name}</Key><LastModified>2026-01-01T00:00:00Z</LastModified><ETag>e</ETag><Size>1</Size></Contents>"
        for name in ("c", "a", "b")
    )
    answer = f"<ListBucketResult><Name>x</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
    opened.proxy.inject(Fault("status", 200, answer.encode(), {"content-type": "application/xml"}), times=None)
    store = opened(client=client, url="s3://cache--use1-az4--x-s3/p", path_style=True)
    assert not store.capabilities.start_after
    assert await all_keys(store, "log/", "log/a") == ["log/b", "log/c"]
    await all_keys(store)
    await store.list_prefixes("log/")
    with pytest.raises(ValueError):
        await all_keys(store, "log")
    for request in opened.proxy.seen:
        if "session" in request.target:
            continue
        query = request.target.partition("?")[2]
        assert "start-after" not in query
        assert "prefix=p%2F&" in query + "&" or "prefix=p%2Flog%2F&" in query + "&", query


EXPRESS_SESSION = (
    b"<CreateSessionResult><Credentials><SessionToken>t</SessionToken><SecretAccessKey>s</SecretAccessKey>"
    b"<AccessKeyId>a</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"
)


@both
async def test_case_24_a_server_that_never_answers(opened: Opener, client: str) -> None:
    await opened(client=client).put("other", b"x")
    store = opened(client=client, request_timeout_s=3.0)
    opened.proxy.inject(Fault("stall"), times=None, contains="/stalled")
    calls = [store.get("stalled", 1), store.put("stalled", b"x"), store.head("stalled"), store.delete(["stalled"])]
    stalled = [asyncio.ensure_future(call) for call in calls]
    assert await store.get("other", 1) == b"x"
    results = await asyncio.wait_for(asyncio.gather(*stalled[:3], return_exceptions=True), 30)
    assert all(isinstance(result, Transient) for result in results), results
    await asyncio.wait([stalled[3]])


@both
async def test_case_28_an_outage_ends_by_itself(opened: Opener, client: str) -> None:
    store = opened(client=client, retries=0, breaker_failures=3, breaker_reset_s=0.2)
    opened.proxy.outage = True
    for _ in range(5):
        with pytest.raises(StoreError):
            await store.put("k", b"x")
    opened.proxy.outage = False
    await asyncio.sleep(0.25)
    await store.put("k", b"x")
    assert await store.get("k", 1) == b"x"


@both
async def test_wrong_bytes_arrive_as_they_are(opened: Opener, client: str) -> None:
    """A store cannot know; the checksums of chunks, segments and headers find them."""
    store = opened(client=client)
    await store.put("k", pattern(1000))
    opened.proxy.inject(Fault("corrupt", count=500), method="GET")
    assert await store.get("k", 1000) != pattern(1000)
    assert await store.get("k", 1000) == pattern(1000)


@both
async def test_errors_inside_a_bulk_deletes_answer_are_returned(opened: Opener, client: str) -> None:
    store = opened(client=client, retries=0)
    prefix = opened.place.prefix
    for key in ("a", "b", "c"):
        await store.put(key, b"x")
    opened.proxy.inject(
        Fault(
            "replace",
            200,
            f"<DeleteResult><Error><Key>{prefix}/b</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>".encode(),
        ),
        times=None,
        method="POST",
    )
    opened.proxy.inject(s3_error(403, "AccessDenied"), times=None, method="DELETE", contains="/b")
    failures = await store.delete(["a", "b", "c"])
    assert [failure.key for failure in failures] == ["b"]
    assert isinstance(failures[0].error, PermissionDenied)


@both
async def test_a_conflict_is_tried_again(opened: Opener, client: str) -> None:
    """409 to a conditional put means that another one is under way; it is not yet an object."""
    store = opened(client=client)
    opened.proxy.inject(s3_error(409, "ConditionalRequestConflict"))
    await store.put_if_absent("k", b"x")
    assert opened.proxy.count("PUT") == 2


@both
async def test_a_missing_key_is_not_found_and_asked_for_once(opened: Opener, client: str) -> None:
    store = opened(client=client)
    with pytest.raises(NotFound):
        await store.get_into("missing", memoryview(bytearray(1)))
    assert opened.proxy.count() == 1
