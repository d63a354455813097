"""The servers that other tests rest on."""

from __future__ import annotations

import os

from support.servers import S3Place


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
