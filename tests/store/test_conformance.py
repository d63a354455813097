"""Every store keeps the one contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import S3Place

from s3kv.settings import StoreSettings
from s3kv.store import Store, open_store
from s3kv.store.faults import FaultPlan, FaultStore
from s3kv.store.guard import GuardedStore, Limits
from s3kv.store.local import LocalStore
from s3kv.store.memory import MemoryStore
from s3kv.store.opening import open_unguarded
from s3kv.store.testing import RawAccess, StoreConformance


class RawMemory:
    def __init__(self, store: MemoryStore) -> None:
        self._objects: dict[str, Any] = store._objects

    def read(self, key: str) -> bytes:
        return bytes(self._objects[key].data)

    def write(self, key: str, data: bytes) -> None:
        self._objects[key] = type("Object", (), {"data": data, "etag": "raw", "modified": 2e9})

    def keys(self) -> list[str]:
        return sorted(self._objects)


class RawFolder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, key: str) -> bytes:
        return (self._root / key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        (self._root / key).parent.mkdir(parents=True, exist_ok=True)
        (self._root / key).write_bytes(data)

    def keys(self) -> list[str]:
        files = (path.relative_to(self._root) for path in self._root.rglob("*") if path.is_file())
        return sorted(str(path) for path in files if path.parts[0] != ".s3kv")


class RawS3:
    """Straight to the bucket with boto3."""

    def __init__(self, place: S3Place) -> None:
        self._place, self._client = place, place.client()

    def _name(self, key: str) -> dict[str, str]:
        return {"Bucket": self._place.bucket, "Key": f"{self._place.prefix}/{key}"}

    def read(self, key: str) -> bytes:
        return bytes(self._client.get_object(**self._name(key))["Body"].read())

    def write(self, key: str, data: bytes) -> None:
        self._client.put_object(**self._name(key), Body=data)

    def keys(self) -> list[str]:
        prefix = f"{self._place.prefix}/"
        found = self._client.list_objects_v2(Bucket=self._place.bucket, Prefix=prefix).get("Contents", [])
        return [entry["Key"].removeprefix(prefix) for entry in found]


class TestMemory(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(page_keys=3)

    @pytest.fixture
    def raw(self, store: MemoryStore) -> RawAccess:
        return RawMemory(store)


class TestLocalFolder(StoreConformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        store = LocalStore(tmp_path / "root +%20=é", page_keys=3)
        yield store
        await store.close()

    @pytest.fixture
    def raw(self, tmp_path: Path) -> RawAccess:
        return RawFolder(tmp_path / "root +%20=é")


class TestGuardedFaultyMemory(StoreConformance):
    """The wrappers, with a plan that does nothing: they change no promise."""

    @pytest.fixture
    def memory(self) -> MemoryStore:
        return MemoryStore(page_keys=3)

    @pytest.fixture
    def store(self, memory: MemoryStore) -> Store:
        return GuardedStore(FaultStore(memory, FaultPlan()), Limits.from_settings(StoreSettings()))

    @pytest.fixture
    def raw(self, memory: MemoryStore) -> RawAccess:
        return RawMemory(memory)


class S3Conformance(StoreConformance):
    client = "obstore"
    more: dict[str, Any] = {}  # noqa: RUF012 (a constant that subclasses replace)

    @pytest.fixture
    def place(self, seaweedfs_place: S3Place) -> S3Place:
        return seaweedfs_place

    @pytest.fixture
    async def store(self, place: S3Place) -> AsyncIterator[Store]:
        store = open_unguarded(place.settings(client=self.client, **self.more))
        yield store
        await store.close()

    @pytest.fixture
    def raw(self, place: S3Place) -> RawAccess:
        return RawS3(place)


class TestObstoreOnSeaweedFS(S3Conformance):
    cut_put_may_leave_empty = True
    orders_by_folder = True


class TestObstoreOnMoto(S3Conformance):
    @pytest.fixture
    def place(self, moto_place: S3Place) -> S3Place:
        return moto_place


class TestGuardedObstoreOnSeaweedFS(S3Conformance):
    """Signed payloads, single deletes, a detected capability, under the guard: what an agent on a strict store has."""

    cut_put_may_leave_empty = True
    orders_by_folder = True

    @pytest.fixture
    async def store(self, place: S3Place) -> AsyncIterator[Store]:
        store = open_store(place.settings(payload_signing="always", delete_mode="single"))
        yield store
        await store.close()


class TestAioboto3OnSeaweedFS(S3Conformance):
    client = "aioboto3"
    cut_put_may_leave_empty = True
    orders_by_folder = True


class TestWithoutConditionalPuts(S3Conformance):
    more = {"conditional_put": "none"}  # noqa: RUF012

    @pytest.fixture
    def place(self, moto_place: S3Place) -> S3Place:
        return moto_place
