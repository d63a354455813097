"""The servers that other tests rest on."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support.servers import S3Place

from s3kv.store import open_store


def test_servers_keep_objects(moto_place: S3Place, seaweedfs_place: S3Place) -> None:
    for place in (moto_place, seaweedfs_place):
        client = place.client()
        client.put_object(Bucket=place.bucket, Key=f"{place.prefix}/a", Body=b"bytes")
        assert client.get_object(Bucket=place.bucket, Key=f"{place.prefix}/a")["Body"].read() == b"bytes"


def test_case_53_no_outside_environment() -> None:
    assert os.environ["AWS_ACCESS_KEY_ID"] == "environment-key"
    assert os.environ["AWS_EC2_METADATA_DISABLED"] == "true"
    leftovers = [
        name for name in os.environ if name.startswith("S3KV_") or name.lower() in ("http_proxy", "https_proxy")
    ]
    assert leftovers == []


@pytest.mark.parametrize("client", ["obstore", "aioboto3"])
async def test_case_51_moto_is_a_server_whose_answers_asynchronous_clients_get(
    moto_place: S3Place, client: str
) -> None:
    store = open_store(moto_place.settings(client=client))
    await store.put("a", b"asynchronous")
    assert await store.get("a", 100) == b"asynchronous"
    await store.close()
    got = moto_place.client().get_object(Bucket=moto_place.bucket, Key=f"{moto_place.prefix}/a")
    assert got["Body"].read() == b"asynchronous"
    assert "moto" not in sys.modules, "its mock within this process patches what asynchronous clients do not pass"


def test_case_51_no_test_uses_the_mock() -> None:
    sources = [path for path in Path(__file__).parents[1].rglob("*.py") if path != Path(__file__)]
    assert len(sources) > 50
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bmock_aws\b|\bmock_s3\b|^\s*(from|import) moto\b", text, re.M), path
