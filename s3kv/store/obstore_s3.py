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

from s3kv.errors import (
    ConfigError,
    CorruptData,
    PermissionDenied,
    S3kvError,
    StoreError,
    StoreMisconfigured,
    Transient,
)
from s3kv.settings import StoreSettings
from s3kv.store import obstore_threads
from s3kv.store.base import LIST_PAGE_KEYS, Body, Failures, Names, ObjectMeta, Page
from s3kv.store.buffers import body_parts, join, until_returned
from s3kv.store.credentials import NoCredentials, UnusableCredentials, provider
from s3kv.store.failures import from_text, named
from s3kv.store.keys import check_key, check_prefix, why_bad_key
from s3kv.store.reads import check_size
from s3kv.store.s3_client import S3Client, delete_each
from s3kv.store.s3_config import USER_AGENT, S3Config
from s3kv.store.spans import Span

T = TypeVar("T")
log = logging.getLogger(__name__)


class ObstoreS3(S3Client):
    def __init__(self, settings: StoreSettings, config: S3Config) -> None:
        super().__init__(settings, config)
        obstore_threads.start()
        self._store = _connect(settings, config, bulk_delete=True)
        self._single = _connect(settings, config, bulk_delete=False)

    async def _read_span(self, key: str, span: Span, only: memoryview | None) -> memoryview:
        size = span.end - span.start
        asked = self._ask("get", key, obstore.get_range_async(self._store, key, start=span.start, length=size))
        got = memoryview(await asked)
        if got.nbytes < size:
            raise CorruptData(f"object {key} ends {size - got.nbytes} bytes before the range does")
        return got

    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        answer = await self._ask("get", check_key(key), obstore.get_async(self._store, key))
        size = answer.meta["size"]
        check_size(key, size, max_bytes)
        data = await self._ask("get", key, answer.bytes_async())
        if len(data) != size:
            raise Transient(f"get {key}: {len(data)} bytes of {size} came")
        return await join([memoryview(data)]), answer.meta["e_tag"] or ""

    async def _put(self, key: str, body: Body, *, if_absent: bool = False, if_match: str | None = None) -> str:
        check_key(key)
        parts = body_parts(body)
        sent: Any = parts if len(parts) > 1 else (parts[0] if parts else b"")
        mode: Any = "create" if if_absent else "overwrite" if if_match is None else {"e_tag": if_match}
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

    async def _pages(self, prefix: str, start_after: str | None) -> AsyncIterator[Page]:
        stream = obstore.list(self._store, prefix or None, offset=start_after, chunk_size=LIST_PAGE_KEYS)
        while True:
            try:
                entries = await self._ask("list", prefix, anext(stream))
            except StopAsyncIteration:
                return
            if page := [_meta(entry) for entry in entries if why_bad_key(entry["path"]) is None]:
                yield page

    async def list_prefixes(self, prefix: str) -> Names:
        asked = self._ask("list", prefix, obstore.list_with_delimiter_async(self._store, check_prefix(prefix) or None))
        found = await asked
        return sorted(name + "/" for name in found["common_prefixes"] if why_bad_key(name) is None)

    async def _delete_batch(self, keys: Sequence[str]) -> Failures:
        try:
            await self._ask("delete", keys[0], obstore.delete_async(self._store, keys))
        except _PartialDelete:
            # obstore names only one of the keys that failed: each is asked for by itself.
            return await self._delete_singly(keys)
        return []

    async def _delete_singly(self, keys: Sequence[str]) -> Failures:
        return await delete_each(keys, lambda key: self._ask("delete", key, obstore.delete_async(self._single, key)))

    async def close(self) -> None:
        """obstore closes its connections when nobody refers to it."""

    async def _ask(self, verb: str, key: str, request: Awaitable[T]) -> T:
        obstore_threads.watch(request)
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
        finally:
            del request  # the error's traceback would keep it, and `obstore_threads` waits for its end

    def _translate(self, subject: str, error: Exception) -> S3kvError:
        text = str(error)
        if "DeleteObjects request failed for key" in text:
            return _PartialDelete(f"{subject}: some keys were not deleted")
        if "External AWS credential provider" in text:
            why = "found none" if NoCredentials.__name__ in text else "failed"
            if UnusableCredentials.__name__ in text:
                why = "found keys with control characters, such as a line break"
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
