"""S3 servers on loopback, as processes of their own: SeaweedFS (exact) and moto (quick).

moto's in-process mock is not used anywhere: it patches botocore, and asynchronous clients do not go through what it
patches (field report 51).
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from s3kv.settings import StoreSettings

ACCESS_KEY, SECRET_KEY, REGION = "test-access-key", "test-secret-key", "us-east-1"
BIN = Path(sys.executable).parent
START_DEADLINE_S = 60.0


@dataclass(frozen=True)
class S3Place:
    """A bucket of a running server, and a prefix of its own for each test."""

    endpoint: str
    bucket: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    region: str = REGION
    prefix: str = field(default_factory=lambda: f"t-{uuid.uuid4().hex[:12]}")

    def fresh(self) -> S3Place:
        """The same bucket under a new prefix."""
        return S3Place(self.endpoint, self.bucket, self.access_key, self.secret_key, self.region)

    def values(self, **changes: Any) -> dict[str, Any]:
        """Values of the `store` section of the settings."""
        return {
            "url": f"s3://{self.bucket}/{self.prefix}",
            "endpoint": self.endpoint,
            "region": self.region,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            **changes,
        }

    def settings(self, **changes: Any) -> StoreSettings:
        return StoreSettings(**self.values(**changes))

    def client(self) -> Any:
        """A boto3 client: raw access that goes past the code under test."""
        return boto3_client(self.endpoint, self.access_key, self.secret_key, self.region)


def boto3_client(
    endpoint: str, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY, region: str = REGION
) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name=region,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, read_timeout=20),
    )


def free_port(partner_offset: int = 0) -> int:
    """A port that is free together with `port + partner_offset`; below the range that outgoing connections take."""
    rng = random.Random(uuid.uuid4().int)
    for _ in range(1000):
        port = rng.randrange(12_000, 22_000)
        if all(_is_free(each) for each in {port, port + partner_offset}):
            return port
    raise RuntimeError("no free port")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def die_with_parent() -> None:
    """In the child: be killed when the test process dies, so that a killed test run leaves no server behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], deadline_s: float = START_DEADLINE_S
) -> bool:
    """True once `ready()`; False when the process has ended or the deadline has passed."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and process.poll() is None:
        with suppress(Exception):
            if ready():
                return True
        time.sleep(0.1)
    return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it and wait until it has: its ports are used again only after that. Its data is thrown away, so it need not
    be asked (SeaweedFS takes some 20 s to leave politely)."""
    if process.poll() is None:
        process.kill()
    process.wait(20)


@contextmanager
def running_moto(folder: Path) -> Iterator[str]:
    """The endpoint of a moto server."""
    for _ in range(3):
        port = free_port()
        endpoint = f"http://127.0.0.1:{port}"
        with (folder / "moto.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / "moto_server"), "-H", "127.0.0.1", "-p", str(port)],
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        try:
            if wait_until(lambda url=endpoint: bool(boto3_client(url).list_buckets()), process):  # type: ignore[misc]
                yield endpoint
                return
        finally:
            stop(process)
    raise RuntimeError(f"moto_server did not start; see {folder}/moto.log")


@contextmanager
def running_seaweedfs(folder: Path) -> Iterator[str]:
    """The endpoint of a SeaweedFS server with its data in `folder`: loopback only, telemetry off."""
    for attempt in range(3):
        data = folder / f"data{attempt}"
        data.mkdir(parents=True)
        port = free_port(10_000)
        endpoint = f"http://127.0.0.1:{port}"
        with (folder / "weed.log").open("ab") as log:
            process = subprocess.Popen(
                _weed_command(data, folder, port),
                stdout=log,
                stderr=log,
                env={**os.environ, "WEED_S3_SSE_KEY": "00" * 32},
                preexec_fn=die_with_parent,
                cwd=data,
            )
        try:
            if wait_until(lambda url=endpoint: _takes_objects(url), process):  # type: ignore[misc]
                yield endpoint
                return
        finally:
            stop(process)
    raise RuntimeError(f"weed did not start; see {folder}/weed.log")


def _weed_command(data: Path, folder: Path, port: int) -> list[str]:
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    return [
        str(BIN / "weed"),
        "-logtostderr=true",
        "server",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={data}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=256",
        "-volume.max=300",
        "-filer",
        "-s3",
        f"-s3.port={port}",
        *(f"-{part}.port={free_port(10_000)}" for part in ("master", "volume", "filer")),
        f"-s3.config={config}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]


def _takes_objects(endpoint: str) -> bool:
    """Listening comes seconds before the first volume can be written."""
    client = boto3_client(endpoint)
    with suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
        client.create_bucket(Bucket="ready")
    client.put_object(Bucket="ready", Key="probe", Body=b"x")
    return True
