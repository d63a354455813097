"""S3 through aioboto3: the second client, for what only botocore does.

S3 Express sessions, SSO and process credentials, unusual signers, and stores that want or refuse particular checksums
(`store.checksums`). It costs more CPU a byte (see the measurements in `docs`), and a body of several buffers is joined,
in a thread. Retries are the guard's, so botocore makes one try. aioboto3 is imported with this module, which
`open_store` imports only when `store.client` asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import aioboto3
import aiohttp
from aiobotocore.config import AioConfig
from botocore import exceptions as boto

from s3kv.errors import (
    CorruptData,
    NotFound,
    PermissionDenied,
    S3kvError,
    StoreError,
    StoreMisconfigured,
    Transient,
    Unsupported,
)
from s3kv.settings import StoreSettings
from s3kv.store.base import LIST_PAGE_KEYS, Body, DeleteError, Failures, Names, ObjectMeta, Page
from s3kv.store.buffers import body_parts, join
from s3kv.store.failures import Trouble, from_answer, from_text, from_trouble, named
from s3kv.store.keys import check_key, check_prefix, why_bad_key
from s3kv.store.reads import check_size
from s3kv.store.s3_client import S3Client, delete_each
from s3kv.store.s3_config import USER_AGENT, S3Config
from s3kv.store.spans import Span

READ_BYTES = 1 << 20
"""What is taken from the socket at once on its way into the caller's buffer."""

T = TypeVar("T")


class Aioboto3S3(S3Client):
    def __init__(self, settings: StoreSettings, config: S3Config) -> None:
        super().__init__(settings, config)
        self._bucket = config.location.root
        self._prefix = f"{config.location.prefix}/" if config.location.prefix else ""
        self._opening = asyncio.Lock()
        self._exit = AsyncExitStack()
        self._client: Any = None

    async def _read_span(self, key: str, span: Span, only: memoryview | None) -> memoryview:
        out = memoryview(bytearray(span.end - span.start)) if only is None else only
        await self._ask("get", key, self._read_range(key, out, span.start))
        return out

    async def _read_range(self, key: str, out: memoryview, offset: int) -> None:
        client = await self._connected()
        answer = await client.get_object(**self._object(key), Range=f"bytes={offset}-{offset + out.nbytes - 1}")
        body = answer["Body"]
        async with body:
            if answer["ResponseMetadata"]["HTTPStatusCode"] != 206 and offset:
                raise Unsupported(f"get {key}: the store ignores ranges")
            if answer["ContentLength"] < out.nbytes:
                raise CorruptData(
                    f"object {key} ends {out.nbytes - answer['ContentLength']} bytes before the range does"
                )
            done = 0
            while done < out.nbytes and (piece := await body.read(min(READ_BYTES, out.nbytes - done))):
                out[done : done + len(piece)] = piece
                done += len(piece)
            if done < out.nbytes:
                raise Transient(f"get {key}: {done} bytes of {out.nbytes} came")

    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        return await self._ask("get", check_key(key), self._read_whole(key, max_bytes))

    async def _read_whole(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        answer = await (await self._connected()).get_object(**self._object(key))
        size = answer["ContentLength"]
        body = answer["Body"]
        async with body:
            check_size(key, size, max_bytes)
            data: bytes = await body.read()
        if len(data) != size:
            raise Transient(f"get {key}: {len(data)} bytes of {size} came")
        return data, answer.get("ETag", "")

    async def _put(self, key: str, body: Body, *, if_absent: bool = False, if_match: str | None = None) -> str:
        conditions = {"IfNoneMatch": "*"} if if_absent else {} if if_match is None else {"IfMatch": if_match}
        data = await join(body_parts(body))
        client = await self._connected()
        request = client.put_object(**self._object(check_key(key)), Body=data, **conditions)
        etag: str = (await self._ask("put", key, request)).get("ETag", "")
        return etag

    async def head(self, key: str) -> ObjectMeta:
        client = await self._connected()
        answer = await self._ask("head", check_key(key), client.head_object(**self._object(key)))
        return ObjectMeta(key, answer["ContentLength"], answer.get("ETag", ""), answer["LastModified"].timestamp())

    async def _pages(self, prefix: str, start_after: str | None) -> AsyncIterator[Page]:
        more = {"StartAfter": self._prefix + start_after} if start_after is not None else {}
        async for answer in self._answers(prefix, **more):
            if page := [meta for entry in answer.get("Contents", ()) if (meta := self._meta(entry))]:
                yield page

    async def list_prefixes(self, prefix: str) -> Names:
        found: set[str] = set()
        async for answer in self._answers(check_prefix(prefix), Delimiter="/"):
            found.update(entry["Prefix"].removeprefix(self._prefix) for entry in answer.get("CommonPrefixes", ()))
        return sorted(name for name in found if why_bad_key(name[:-1]) is None)

    async def _answers(self, prefix: str, **more: str) -> AsyncIterator[dict[str, Any]]:
        client = await self._connected()
        while True:
            request = client.list_objects_v2(
                Bucket=self._bucket, Prefix=self._prefix + prefix, MaxKeys=LIST_PAGE_KEYS, **more
            )
            answer = await self._ask("list", prefix, request)
            yield answer
            token = answer.get("NextContinuationToken")
            if not answer.get("IsTruncated") or not token:
                return
            more = {**more, "ContinuationToken": token}

    def _meta(self, entry: dict[str, Any]) -> ObjectMeta | None:
        key: str = entry["Key"].removeprefix(self._prefix)
        if why_bad_key(key) is not None:
            return None
        return ObjectMeta(key, entry["Size"], entry.get("ETag", ""), entry["LastModified"].timestamp())

    async def _delete_batch(self, keys: Sequence[str]) -> Failures:
        client = await self._connected()
        wanted = {"Objects": [{"Key": self._prefix + key} for key in keys], "Quiet": True}
        answer = await self._ask("delete", keys[0], client.delete_objects(Bucket=self._bucket, Delete=wanted))
        failures: Failures = []
        for entry in answer.get("Errors", ()):
            key = entry["Key"].removeprefix(self._prefix)
            error = from_answer(self._config.target, f"delete {key}", _STATUS_OF_CODE.get(entry["Code"]), entry["Code"])
            if isinstance(error, StoreError) and not isinstance(error, NotFound):
                failures.append(DeleteError(key, error))
        return failures

    async def _delete_singly(self, keys: Sequence[str]) -> Failures:
        client = await self._connected()
        return await delete_each(keys, lambda key: self._ask("delete", key, client.delete_object(**self._object(key))))

    async def close(self) -> None:
        async with self._opening:
            self._client = None
            await self._exit.aclose()

    def _object(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    async def _connected(self) -> Any:
        async with self._opening:
            if self._client is None:
                self._client = await self._ask("connect", "", self._exit.enter_async_context(self._new_client()))
                self._client.meta.events.register_last("before-parameter-build.s3", _never_redirect)
            return self._client

    def _new_client(self) -> Any:
        settings, config = self._settings, self._config
        secret, token = settings.secret_access_key, settings.session_token
        session = aioboto3.Session(
            aws_access_key_id=settings.access_key_id,
            aws_secret_access_key=secret.get_secret_value() if secret else None,
            aws_session_token=token.get_secret_value() if token else None,
            profile_name=settings.profile,
        )
        verify: Any = str(config.ca_file) if config.ca_file and settings.tls_verify else settings.tls_verify
        return session.client(
            "s3",
            endpoint_url=config.endpoint,
            region_name=config.region,
            verify=verify,
            config=_client_config(settings, config),
        )

    async def _ask(self, verb: str, key: str, request: Awaitable[T]) -> T:
        try:
            return await request
        except S3kvError:
            raise
        except Exception as error:  # also KeyErrors and the like: botocore trips over answers that make no sense
            raise self._translate(f"{verb} {key}".strip(), error) from error

    def _translate(self, subject: str, error: Exception) -> S3kvError:
        target = self._config.target
        if isinstance(error, boto.ClientError):
            said = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(said.get("Code", ""))
            if code.isdigit():  # an answer without a body: botocore repeats the status
                code = ""
            return from_answer(target, subject, status, code, said.get("Region"))
        if isinstance(error, boto.NoCredentialsError | boto.CredentialRetrievalError | boto.PartialCredentialsError):
            return PermissionDenied(
                f"no credentials: the AWS chain failed; set {named('access_key_id')} or {named('profile')}"
            )
        if isinstance(error, boto.ProfileNotFound | boto.ParamValidationError):
            return StoreMisconfigured(f"botocore refuses {named('profile')}, {named('url')} or {named('endpoint')}")
        if trouble := _trouble(error):
            return from_trouble(target, subject, trouble)
        if isinstance(error, boto.BotoCoreError | aiohttp.ClientError | OSError):
            return from_text(target, subject, f"{error} {getattr(error, 'kwargs', {}).get('error', '')}")
        return Transient(f"{subject}: the answer of {target.where} makes no sense ({type(error).__name__})")


_STATUS_OF_CODE = {"AccessDenied": 403, "NoSuchKey": 404, "InternalError": 500, "SlowDown": 503}


def _trouble(error: Exception) -> Trouble | None:
    if isinstance(error, boto.ConnectTimeoutError | boto.ReadTimeoutError | TimeoutError):
        return "timeout"
    if isinstance(error, boto.ConnectionClosedError | aiohttp.ClientPayloadError | boto.ResponseStreamingError):
        return "interrupted"
    return None


def _never_redirect(context: dict[str, Any], **_: Any) -> None:
    """Botocore follows a bucket to another region, which hides a wrong `store.region`, and without end where an answer
    lacks the region's name: let the redirect be an error."""
    context.setdefault("s3_redirect", {})["redirected"] = True


def _client_config(settings: StoreSettings, config: S3Config) -> AioConfig:
    return AioConfig(
        max_pool_connections=settings.max_connections,
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.request_timeout_s,
        retries={"total_max_attempts": 1},
        user_agent_extra=USER_AGENT,
        request_checksum_calculation=settings.checksums,
        response_checksum_validation=settings.checksums,
        s3={
            "addressing_style": "path" if config.path_style else "virtual",
            "payload_signing_enabled": not config.unsigned_payload,
        },
    )
