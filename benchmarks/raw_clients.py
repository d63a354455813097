"""S3 clients as one would use them without s3kv, all doing the same: put from a buffer, get into the caller's buffer.

`run(work, keys, at_once)` puts or gets every key, `at_once` at a time; each place has a buffer of its own.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import cycle
from typing import Any, Literal, Protocol

from support.servers import ACCESS_KEY, REGION, SECRET_KEY

from benchmarks.origins import BUCKET, Origin
from s3kv.store import open_store

Work = Literal["put", "get"]


class Client(Protocol):
    def run(self, work: Work, keys: Sequence[str], at_once: int) -> None: ...
    def close(self) -> None: ...


class _Async:
    """Runs coroutines `_put(key, body)` and `_get(key, out)` on a loop of its own."""

    def __init__(self, size: int, most_at_once: int = 16) -> None:
        self._loop = asyncio.new_event_loop()
        self._buffers = [memoryview(bytearray(size)) for _ in range(most_at_once)]
        self._body = memoryview(bytes(range(256)) * (size // 256))

    async def _put(self, key: str, body: memoryview) -> None:
        raise NotImplementedError

    async def _get(self, key: str, out: memoryview) -> None:
        raise NotImplementedError

    def run(self, work: Work, keys: Sequence[str], at_once: int) -> None:
        waiting = iter(keys)

        async def place(number: int) -> None:
            for key in waiting:
                await (self._put(key, self._body) if work == "put" else self._get(key, self._buffers[number]))

        async def all_places() -> None:
            await asyncio.gather(*(place(number) for number in range(at_once)))

        self._loop.run_until_complete(all_places())

    def check(self) -> None:
        """The first buffer holds what was put."""
        assert self._buffers[0] == self._body

    def do(self, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await work

        return self._loop.run_until_complete(run())

    def close(self) -> None:
        self._loop.close()


class Ours(_Async):
    """The store that `open_store` gives: guard, conditions and all."""

    def __init__(self, origin: Origin, size: int, **changes: Any) -> None:
        super().__init__(size)
        self._store = open_store(origin.settings(**changes))

    async def _put(self, key: str, body: memoryview) -> None:
        await self._store.put(key, body)

    async def _get(self, key: str, out: memoryview) -> None:
        await self._store.get_into(key, out)

    def close(self) -> None:
        self.do(self._store.close())
        super().close()


class Obstore(_Async):
    """`copy`: into the caller's buffer, as everybody else does; without it the bytes stay in obstore's own buffer."""

    def __init__(self, origin: Origin, size: int, prefix: str = "ours", *, copy: bool = True) -> None:
        super().__init__(size)
        self._store = obstore_store(origin, prefix)
        self._copy = copy

    async def _put(self, key: str, body: memoryview) -> None:
        import obstore

        await obstore.put_async(self._store, key, body, use_multipart=False)

    async def _get(self, key: str, out: memoryview) -> None:
        import obstore

        data = await (await obstore.get_async(self._store, key)).bytes_async()
        if self._copy:
            out[:] = memoryview(data)


def obstore_store(origin: Origin, prefix: str) -> Any:
    from obstore.store import S3Store

    options: dict[str, Any] = {"allow_http": True, "timeout": timedelta(seconds=60)}
    if origin.ca is not None:
        options["root_certificate"] = origin.ca.read_bytes()
    config: dict[str, Any] = {
        "endpoint": origin.endpoint, "region": REGION, "access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY,
        "virtual_hosted_style_request": False, "unsigned_payload": True,
    }  # fmt: skip
    return S3Store(BUCKET, prefix=prefix, config=config, client_options=options)  # type: ignore[arg-type]


def _botocore_options() -> dict[str, Any]:
    return {
        "s3": {"addressing_style": "path", "payload_signing_enabled": False},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": 32,
    }


def _botocore_arguments(origin: Origin) -> dict[str, Any]:
    return {
        "endpoint_url": origin.endpoint, "region_name": REGION, "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY, "verify": str(origin.ca) if origin.ca else None,
    }  # fmt: skip


class Boto3:
    """In threads: a get is read from the raw stream into the buffer, a put reads from a memoryview."""

    def __init__(self, origin: Origin, size: int, prefix: str = "ours") -> None:
        import boto3
        from botocore.config import Config

        self._client = boto3.client("s3", config=Config(**_botocore_options()), **_botocore_arguments(origin))
        self._prefix = prefix
        self._body = bytes(range(256)) * (size // 256)
        self._buffers = cycle([memoryview(bytearray(size)) for _ in range(16)])
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def run(self, work: Work, keys: Sequence[str], at_once: int) -> None:
        pool = self._pools.setdefault(at_once, ThreadPoolExecutor(at_once))
        act: Callable[[str], None] = self._put if work == "put" else self._get
        list(pool.map(act, keys))

    def _put(self, key: str) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"{self._prefix}/{key}", Body=io.BytesIO(self._body))

    def _get(self, key: str) -> None:
        out = next(self._buffers)
        raw = self._client.get_object(Bucket=BUCKET, Key=f"{self._prefix}/{key}")["Body"]._raw_stream
        done = 0
        while done < len(out) and (count := raw.readinto(out[done:])):
            done += count
        assert done == len(out)
        raw.release_conn()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()
        self._client.close()


class Aioboto3(_Async):
    def __init__(self, origin: Origin, size: int, prefix: str = "ours") -> None:
        import aioboto3
        from aiobotocore.config import AioConfig

        super().__init__(size)
        self._prefix = prefix
        self._bytes = bytes(self._body)
        options = AioConfig(**_botocore_options())
        self._opened = aioboto3.Session().client("s3", config=options, **_botocore_arguments(origin))
        self._client = self.do(self._opened.__aenter__())

    async def _put(self, key: str, body: memoryview) -> None:
        await self._client.put_object(Bucket=BUCKET, Key=f"{self._prefix}/{key}", Body=self._bytes)

    async def _get(self, key: str, out: memoryview) -> None:
        answer = await self._client.get_object(Bucket=BUCKET, Key=f"{self._prefix}/{key}")
        async with answer["Body"] as body:
            out[:] = await body.read()

    def close(self) -> None:
        self.do(self._opened.__aexit__(None, None, None))
        super().close()
