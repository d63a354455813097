"""S3 through obstore (the object_store crate): the client that carries bytes by default.

Facts it rests on, each tested: a put takes a list of buffers without joining or copying them, and lets go of them some
milliseconds after it was cancelled; `get` hands out a buffer of its own, so bytes are copied once into the slot;
configuration that is not given is read from `AWS_*` variables, which is why endpoint and keys are always given. Retries
are the guard's, not obstore's, so that they are bounded and counted in one place. Puts are never multipart.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError, InvalidPathError
from obstore.store import MemoryStore

from s3kv.errors import (
    AlreadyExists,
    ConfigError,
    CorruptData,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    S3kvError,
    StoreError,
    StoreMisconfigured,
    Transient,
)
from s3kv.settings import StoreSettings
from s3kv.store.base import (
    DELETE_BATCH_KEYS,
    LIST_PAGE_KEYS,
    Body,
    Capabilities,
    DeleteError,
    Failures,
    Names,
    ObjectMeta,
    Page,
)
from s3kv.store.buffers import body_parts, check_ranges, copy_into, for_each, join, until_returned
from s3kv.store.credentials import NoCredentials, provider
from s3kv.store.failures import from_text, named
from s3kv.store.keys import check_key, check_prefix, check_start_after, why_bad_key
from s3kv.store.s3_config import USER_AGENT, S3Config
from s3kv.store.spans import Span, plan_spans

T = TypeVar("T")
log = logging.getLogger(__name__)


def _start_runtime() -> None:
    """Make obstore start its threads now. Raises ConfigError when the machine has no descriptor or thread for them.

    Left to the first request, a moment without descriptors makes obstore unusable for the rest of the process: its
    runtime is poisoned, and every later call panics.
    """
    try:
        obstore.put(MemoryStore(), "start", b"")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise ConfigError(f"{named('client')}: obstore cannot start: {error}") from error


class ObstoreS3:
    """Conditional headers are sent as asked for: `ConditionalStore` knows whether the store honours them."""

    def __init__(self, settings: StoreSettings, config: S3Config) -> None:
        self._config = config
        self._express = config.location.express
        self._batch = settings.delete_mode == "batch"
        _start_runtime()
        self._store = _connect(settings, config, bulk_delete=True)
        self._single = _connect(settings, config, bulk_delete=False)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(None, None, start_after=not self._express)

    async def get_into(self, key: str, out: memoryview, offset: int = 0) -> int:
        await self.get_ranges(key, [(offset, out.nbytes)], [out])
        return out.nbytes

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
        flat = check_ranges(ranges, outs)
        check_key(key)

        async def read(span: Span) -> None:
            size = span.end - span.start
            request = obstore.get_range_async(self._store, key, start=span.start, length=size)
            got = memoryview(await self._ask("get", key, request))
            if got.nbytes < size:
                raise CorruptData(f"object {key} ends {size - got.nbytes} bytes before the range does")
            for index in span.members:
                at = ranges[index][0] - span.start
                await copy_into(flat[index], got[at : at + flat[index].nbytes])

        await for_each(plan_spans(ranges), read)

    async def get(self, key: str, max_bytes: int) -> bytes:
        return (await self.get_with_etag(key, max_bytes))[0]

    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        answer = await self._ask("get", check_key(key), obstore.get_async(self._store, key))
        size = answer.meta["size"]
        if size > max_bytes:
            raise CorruptData(f"object {key} has {size} bytes, more than the {max_bytes} allowed")
        data = await self._ask("get", key, answer.bytes_async())
        if len(data) != size:
            raise Transient(f"get {key}: {len(data)} bytes of {size} came")
        return await join([memoryview(data)]), answer.meta["e_tag"] or ""

    async def put(self, key: str, body: Body) -> str:
        return await self._put(key, body, "overwrite")

    async def put_if_absent(self, key: str, body: Body) -> str:
        try:
            return await self._put(key, body, "create")
        except PreconditionFailed as error:
            raise AlreadyExists(f"object {key} exists") from error

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        try:
            return await self._put(key, body, {"e_tag": etag})
        except NotFound as error:  # S3 answers 404 to If-Match where nothing is
            raise PreconditionFailed(f"object {key} is gone") from error

    async def _put(self, key: str, body: Body, mode: Any) -> str:
        check_key(key)
        parts = body_parts(body)
        sent: Any = parts if len(parts) > 1 else (parts[0] if parts else b"")
        try:
            done = await self._ask(
                "put", key, obstore.put_async(self._store, key, sent, mode=mode, use_multipart=False)
            )
        finally:
            del sent
            await until_returned(parts)
        return done["e_tag"] or ""

    async def head(self, key: str) -> ObjectMeta:
        return _meta(await self._ask("head", check_key(key), obstore.head_async(self._store, key)))

    async def list(self, prefix: str, start_after: str | None = None) -> AsyncIterator[Page]:
        check_prefix(prefix)
        check_start_after(start_after)
        if self._express:
            for page in await self._list_unordered(prefix, start_after):
                yield page
            return
        async for page in self._pages(prefix, start_after):
            yield page

    async def _pages(self, prefix: str, start_after: str | None) -> AsyncIterator[Page]:
        stream = obstore.list(self._store, prefix or None, offset=start_after, chunk_size=LIST_PAGE_KEYS)
        while True:
            try:
                entries = await self._ask("list", prefix, anext(stream))
            except StopAsyncIteration:
                return
            if page := [_meta(entry) for entry in entries if why_bad_key(entry["path"]) is None]:
                yield page

    async def _list_unordered(self, prefix: str, start_after: str | None) -> Sequence[Page]:
        """Directory buckets list in no order and cannot begin after a key: everything is read, sorted and skipped."""
        found = [meta async for page in self._pages(prefix, None) for meta in page]
        found = sorted((meta for meta in found if meta.key > (start_after or "")), key=lambda meta: meta.key)
        return [found[at : at + LIST_PAGE_KEYS] for at in range(0, len(found), LIST_PAGE_KEYS)]

    async def list_prefixes(self, prefix: str) -> Names:
        request = obstore.list_with_delimiter_async(self._store, check_prefix(prefix) or None)
        found = await self._ask("list", prefix, request)
        return sorted(name + "/" for name in found["common_prefixes"] if why_bad_key(name) is None)

    async def delete(self, keys: Sequence[str]) -> Failures:
        checked = [check_key(key) for key in keys]
        if not self._batch:
            return await self._delete_singly(checked)
        failures: Failures = []
        for at in range(0, len(checked), DELETE_BATCH_KEYS):
            batch = checked[at : at + DELETE_BATCH_KEYS]
            try:
                await self._ask("delete", batch[0], obstore.delete_async(self._store, batch))
            except _PartialDelete:
                # obstore names only one of the keys that failed: each is asked for by itself.
                failures += await self._delete_singly(batch)
            except StoreError as error:
                if at == 0:
                    raise
                failures += [DeleteError(key, error) for key in checked[at:]]
                break
        return failures

    async def _delete_singly(self, keys: Sequence[str]) -> Failures:
        failures: Failures = []

        async def delete_one(key: str) -> None:
            try:
                await self._ask("delete", key, obstore.delete_async(self._single, key))
            except NotFound:
                pass
            except StoreError as error:
                failures.append(DeleteError(key, error))

        await for_each(keys, delete_one)
        return failures

    async def close(self) -> None:
        """obstore closes its connections when nobody refers to it."""

    async def _ask(self, verb: str, key: str, request: Awaitable[T]) -> T:
        try:
            return await request
        except StopAsyncIteration:
            raise
        except Exception as error:
            raise self._translate(f"{verb} {key}", error) from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # cancellation and the like
                raise
            raise Transient(f"{verb} {key}: the S3 client failed inside") from error

    def _translate(self, subject: str, error: Exception) -> S3kvError:
        text = str(error)
        if "DeleteObjects request failed for key" in text:
            return _PartialDelete(f"{subject}: some keys were not deleted")
        if "External AWS credential provider" in text:
            why = "found none" if NoCredentials.__name__ in text else "failed"
            return PermissionDenied(
                f"no credentials: the AWS chain {why}; set {named('access_key_id')} or {named('profile')}"
            )
        if isinstance(error, InvalidPathError):
            return StoreMisconfigured(
                f"{subject}: bucket {self._config.target.bucket} holds a name there that obstore cannot read; "
                f"remove it or set {named('client')} to aioboto3"
            )
        return from_text(self._config.target, subject, text)


class _PartialDelete(StoreError):
    """A bulk delete's answer was 200 and named keys that are still there."""


def _meta(entry: Any) -> ObjectMeta:
    return ObjectMeta(entry["path"], entry["size"], entry["e_tag"] or "", entry["last_modified"].timestamp())


def _connect(settings: StoreSettings, config: S3Config, *, bulk_delete: bool) -> Any:
    from obstore.store import S3Store

    build: Callable[..., Any] = S3Store
    try:
        return build(
            config.location.root,
            prefix=config.location.prefix or None,
            config={**_aws_config(config), "disable_bulk_delete": not bulk_delete},
            client_options=_client_options(settings, config),
            retry_config={"max_retries": 0},
            credential_provider=provider(settings),
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(
            f"the S3 client refuses {named('url')}, {named('endpoint')} or {named('ca_bundle')}"
        ) from error


def _aws_config(config: S3Config) -> dict[str, Any]:
    aws: dict[str, Any] = {
        "region": config.region,
        "unsigned_payload": config.unsigned_payload,
        "virtual_hosted_style_request": not config.path_style,
        "conditional_put": "etag",
        "s3_express": config.location.express and config.endpoint is None,
    }
    if config.endpoint is not None:
        endpoint = config.endpoint
        if not config.path_style:  # obstore wants the bucket in the host already
            scheme, _, host = endpoint.partition("://")
            endpoint = f"{scheme}://{config.location.root}.{host}"
        aws |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
    return aws


def _client_options(settings: StoreSettings, config: S3Config) -> dict[str, Any]:
    options: dict[str, Any] = {
        "allow_http": config.endpoint is not None and config.endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
        "timeout": timedelta(seconds=settings.request_timeout_s),
        "pool_max_idle_per_host": str(settings.max_connections),
        "user_agent": USER_AGENT,
    }
    if not settings.tls_verify:
        options["allow_invalid_certificates"] = True
    if config.ca_pem is not None:
        options["root_certificate"] = config.ca_pem
    return options
