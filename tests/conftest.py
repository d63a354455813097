"""Fixtures that every test folder may use. Servers are started by the first test of a worker that asks for them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from support.servers import S3Place, running_moto, running_seaweedfs

pytest.register_assert_rewrite("s3kv.store.testing")

settings.register_profile(
    "ci", max_examples=30, deadline=None, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "thorough", max_examples=1000, deadline=None, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("S3KV_TEST_PROFILE", "ci"))

FAKE_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "environment-key",
    "AWS_SECRET_ACCESS_KEY": "environment-secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent/aws/config",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent/aws/credentials",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


def _is_outside_setting(name: str) -> bool:
    return name.startswith(("AWS_", "S3KV_")) or name.lower().endswith("_proxy")


@pytest.fixture(scope="session", autouse=True)
def _clean_session() -> Iterator[None]:
    """Servers of the session are started without the developer's own AWS settings, S3KV settings and proxies."""
    with pytest.MonkeyPatch.context() as patch:
        _clean(patch)
        yield


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every test sees the same environment: no AWS, S3KV or proxy variables but fake keys; no metadata service."""
    _clean(monkeypatch)
    return monkeypatch


def _clean(patch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if _is_outside_setting(name):
            patch.delenv(name)
    for name, value in FAKE_ENVIRONMENT.items():
        patch.setenv(name, value)


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of a moto server of this worker."""
    with running_moto(tmp_path_factory.mktemp("moto")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of a SeaweedFS server of this worker."""
    with running_seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def _moto_bucket(moto_server: str) -> S3Place:
    return _with_bucket(S3Place(moto_server, "tests"))


@pytest.fixture(scope="session")
def _seaweedfs_bucket(seaweedfs: str) -> S3Place:
    return _with_bucket(S3Place(seaweedfs, "tests"))


def _with_bucket(place: S3Place) -> S3Place:
    place.client().create_bucket(Bucket=place.bucket)
    return place


@pytest.fixture
def moto_place(_moto_bucket: S3Place) -> S3Place:
    """A fresh prefix in a bucket of the moto server; `.settings()` gives StoreSettings."""
    return _moto_bucket.fresh()


@pytest.fixture
def seaweedfs_place(_seaweedfs_bucket: S3Place) -> S3Place:
    """A fresh prefix in a bucket of the SeaweedFS server; `.settings()` gives StoreSettings."""
    return _seaweedfs_bucket.fresh()
