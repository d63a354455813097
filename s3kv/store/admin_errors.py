"""botocore's errors about a bucket, translated once into the few that s3kv has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from botocore import exceptions as boto

from s3kv.errors import NotFound, PermissionDenied, StoreError, StoreMisconfigured, StoreTimeout, Transient, Unsupported

_WRONG_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AuthFailure"}
_WRONG_REGION = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "InvalidLocationConstraint",
    "301",
    "307",
}
_UNSUPPORTED = {"NotImplemented", "MethodNotAllowed", "UnsupportedOperation", "XNotImplemented"}
_PASSING = {"OperationAborted", "SlowDown", "Throttling", "RequestTimeout", "ServiceUnavailable", "InternalError"}


@contextmanager
def translated(bucket: str, region: str) -> Iterator[None]:
    """Errors of botocore that leave the block become s3kv's, one sentence each, with the cause chained."""
    try:
        yield
    except boto.ClientError as error:
        raise _of_answer(error, bucket, region) from error
    except boto.BotoCoreError as error:
        raise _without_answer(error) from error


def error_code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _of_answer(error: boto.ClientError, bucket: str, region: str) -> StoreError:
    code, status = error_code(error), _status(error)
    if code in {"NoSuchBucket", "404"}:
        return StoreMisconfigured(f'bucket "{bucket}" does not exist: set store.url, or run s3kv bucket create')
    if code in _WRONG_REGION:
        return wrong_region(bucket, _region_in(error.response), region)
    if code == "BucketAlreadyExists":
        return StoreMisconfigured(f'bucket name "{bucket}" is taken by another account: set store.url to another name')
    if code in {"RequestTimeTooSkewed", "RequestExpired"}:
        return StoreMisconfigured("this machine's clock is too far off for the object store: set the clock (NTP)")
    if code in _WRONG_KEYS:
        return PermissionDenied(
            f"the object store refuses these credentials ({code}): set store.access_key_id and"
            " store.secret_access_key, or the AWS credentials that are in use"
        )
    if code in {"AccessDenied", "AllAccessDisabled", "403"} or status == 403:
        return PermissionDenied(f'{error.operation_name} on bucket "{bucket}" is not allowed to these credentials')
    if code in _UNSUPPORTED or status in {405, 501}:
        return Unsupported(f"this object store does not offer {error.operation_name}")
    if code in _PASSING or status >= 500 or status in {409, 429}:
        return Transient(f'{error.operation_name} on bucket "{bucket}" failed for now: {code or status}')
    if status == 404:
        return NotFound(f'{error.operation_name} on bucket "{bucket}": {code}')
    return StoreMisconfigured(f'{error.operation_name} on bucket "{bucket}" was refused: {code or status} (store.url)')


def _without_answer(error: boto.BotoCoreError) -> StoreError:
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError):
        return PermissionDenied(
            "no usable AWS credentials were found: set store.access_key_id and store.secret_access_key,"
            " store.profile, or give the machine a role"
        )
    if isinstance(error, boto.SSLError):
        return StoreMisconfigured(f"the object store's certificate is not trusted: set store.ca_bundle ({error})")
    if isinstance(error, boto.ReadTimeoutError | boto.ConnectTimeoutError):
        return StoreTimeout(f"the object store did not answer in time: {error} (store.endpoint)")
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectionClosedError | boto.ProxyConnectionError):
        return StoreMisconfigured(f"the object store cannot be reached: {error} (store.endpoint)")
    # The texts of others repeat what they choke on, such as a header with a key in it.
    kind = type(error.kwargs.get("error", error)).__name__
    if isinstance(error, boto.HTTPClientError):
        return StoreMisconfigured(f"the object store cannot be reached: {kind} (store.endpoint)")
    return StoreMisconfigured(f"the object store's client refuses its settings: {kind} (store.url, store.endpoint)")


def wrong_region(bucket: str, found: str | None, configured: str) -> StoreMisconfigured:
    remedy = f"set store.region (or S3KV_STORE__REGION) to {found}" if found else "set store.region"
    return StoreMisconfigured(f'bucket "{bucket}" is in {found or "another region"}, not {configured}: {remedy}')


def _status(error: boto.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _region_in(response: dict[str, Any]) -> str | None:
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    found = headers.get("x-amz-bucket-region") or response.get("Error", {}).get("Region")
    return str(found) if found else None
