"""What stores say when they fail, put into our few kinds of error and one clear sentence. Pure.

Sources: the S3 API's "Error responses" page for codes and statuses; texts of obstore 0.12 and botocore 1.40 as met.
No text of an answer is passed on but its error code and the region it expects: answers may echo request headers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from s3kv.errors import (
    AlreadyExists,
    BreakerOpen,
    ConfigError,
    CorruptData,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    S3kvError,
    StoreError,
    StoreMisconfigured,
    StoreTimeout,
    Transient,
    Unsupported,
)
from s3kv.settings import StoreSettings

Trouble = Literal["refused", "unknown_host", "certificate", "not_tls", "timeout", "interrupted"]

_WRONG_REGION = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_TRANSIENT = {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "IncompleteBody", "BadDigest"}
_TRANSIENT |= {"OperationAborted", "ConditionalRequestConflict", "ThrottlingException", "XAmzContentSHA256Mismatch"}
_UNSUPPORTED = {"NotImplemented", "MethodNotAllowed", "MissingContentMD5", "InvalidDigest"}


def named(setting: str) -> str:
    """A setting of the `store` section, as error messages name it."""
    return f"store.{setting} (or S3KV_STORE__{setting.upper()})"


@dataclass(frozen=True, slots=True)
class Target:
    """Whom we talk to, for sentences. Holds no secret."""

    bucket: str
    where: str
    """The endpoint's URL, or "AWS"."""
    region: str


def from_answer(
    target: Target, subject: str, status: int | None, code: str, expected_region: str | None = None
) -> StoreError | CorruptData:
    """The error for an HTTP answer. `subject` is what was tried, like "get ns/x"; `code` is S3's error code or "".

    412 becomes PreconditionFailed: only the caller knows that it asked for absence.
    """
    said = f"{subject}: {target.where} answered {' '.join(str(part) for part in (status, code) if part)}"
    if error := _misconfigured(target, status, code, expected_region):
        return error
    if code in _TRANSIENT or status in (408, 409, 429) or (status is not None and status >= 500 and status != 501):
        return Transient(said)
    if code in _UNSUPPORTED or status in (405, 501):
        return Unsupported(said)
    if status == 404:
        return NotFound(said)
    if status == 412:
        return PreconditionFailed(said)
    if status == 416:
        return CorruptData(f"{subject}: the object ends before the range")
    return StoreError(said)


def _misconfigured(target: Target, status: int | None, code: str, expected_region: str | None) -> StoreError | None:
    if code == "RequestTimeTooSkewed":
        return StoreMisconfigured(
            f"the clock of this machine is too far from that of {target.where}: set the system's clock"
        )
    if code in _WRONG_REGION or status in (301, 307):
        expects = f", the store expects {expected_region}" if expected_region else ""
        return StoreMisconfigured(
            f"bucket {target.bucket} is not in region {target.region}{expects}: set {named('region')}"
        )
    if code == "NoSuchBucket":
        return StoreMisconfigured(f"bucket {target.bucket} does not exist at {target.where}: set {named('url')}")
    if code in _EXPIRED:
        return PermissionDenied(
            f"the credentials for bucket {target.bucket} have expired: renew them, or set {named('session_token')}"
        )
    if code in _WRONG_KEY:
        return PermissionDenied(
            f"{target.where} does not know these credentials ({code}): set {named('access_key_id')} and "
            f"{named('secret_access_key')}, or the AWS credential chain"
        )
    if status in (401, 403):
        return PermissionDenied(
            f"{target.where} denies access to bucket {target.bucket} ({code or status}): give these credentials "
            f"permission, or set {named('access_key_id')}"
        )
    return None


def from_trouble(target: Target, subject: str, trouble: Trouble) -> StoreError:
    """The error for a request that had no answer, or no whole one.

    A refused connection and an unknown host are Transient: on the serving path a store that restarts comes back.
    """
    match trouble:
        case "certificate":
            return StoreMisconfigured(
                f"the TLS certificate of {target.where} is not trusted: set {named('ca_bundle')} to its CA's PEM file"
            )
        case "not_tls":
            return StoreMisconfigured(f"{target.where} does not speak TLS: set {named('endpoint')} to its http:// URL")
        case "timeout":
            return StoreTimeout(f"{subject}: no answer from {target.where} in time")
        case "refused":
            return Transient(f"{target.where} refuses connections: is {named('endpoint')} right and the store running?")
        case "unknown_host":
            return Transient(f"the host of {target.where} is unknown: is {named('endpoint')} right?")
        case "interrupted":
            return Transient(f"{subject}: the connection to {target.where} broke")


_STATUS = re.compile(r"status(?: code)?: (\d{3})\b")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>|\(code (\w{1,64})\)")
_EXPECTED_REGION = re.compile(r"expecting '([a-z0-9-]{1,40})'|<Region>([a-z0-9-]{1,40})</Region>")


def from_text(target: Target, subject: str, text: str) -> StoreError | CorruptData:
    """The error for what an HTTP library printed; for clients that give nothing better."""
    region = _first_group(_EXPECTED_REGION, text)
    status, code = _first_group(_STATUS, text), _first_group(_CODE, text)
    if "incorrectly configured region" in text:
        return from_answer(target, subject, 301, "PermanentRedirect", region)
    if status or code:
        return from_answer(target, subject, int(status) if status else None, code or "", region)
    return from_trouble(target, subject, _trouble(text))


def _first_group(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return next((group for group in found.groups() if group), None) if found else None


def _trouble(text: str) -> Trouble:
    if "InvalidCertificate" in text or "CERTIFICATE_VERIFY_FAILED" in text or "UnknownIssuer" in text:
        return "certificate"
    if "InvalidContentType" in text or "WRONG_VERSION_NUMBER" in text or "record layer" in text.lower():
        return "not_tls"
    if "ConnectionRefused" in text or "Connection refused" in text or "Connect call failed" in text:
        return "refused"
    if "dns error" in text or "lookup address" in text or "Name or service not known" in text:
        return "unknown_host"
    if "kind: Timeout" in text or "TimedOut" in text:
        return "timeout"
    return "interrupted"


def describe_failure(error: BaseException, settings: StoreSettings) -> str:
    """One line for a person at a terminal: what failed, and the setting to look at. Never holds a secret."""
    if isinstance(error, ConfigError):
        sentence = str(error)
    elif isinstance(error, BreakerOpen):
        sentence = (
            f"the store {settings.url} has failed repeatedly and is not asked again for {settings.breaker_reset_s:g} s"
        )
    elif isinstance(error, StoreTimeout):
        sentence = f"{error}; {named('request_timeout_s')} is {settings.request_timeout_s:g}"
    elif isinstance(error, Unsupported):
        sentence = f"{error}: see {named('conditional_put')}, {named('delete_mode')} and {named('checksums')}"
    elif isinstance(error, AlreadyExists | S3kvError):
        sentence = str(error)
    else:
        sentence = f"{type(error).__name__} while talking to {settings.url}"
    return " ".join(sentence.split())
