"""Creating and checking a bucket, through a boto3 S3 client that the caller passes in.

Both compare what a bucket is (`read_state`) with what it should be (`desired_state`); `create_bucket` then writes what
differs. What is not s3kv's on a shared bucket is kept: other lifecycle rules, policy statements, tags.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from botocore.exceptions import ClientError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential
from tenacity.nap import sleep as real_sleep

from s3kv.errors import StoreMisconfigured, Transient, Unsupported
from s3kv.store.admin_errors import error_code, translated, wrong_region
from s3kv.store.bucket_spec import (
    PUBLIC_ACCESS_BLOCK,
    BucketSpec,
    as_text,
    default_encryption,
    desired_state,
    lifecycle_rules,
    plain_encryption,
    plain_rule,
    plain_statement,
    policy_statements,
    with_current_id,
)

__all__ = ["UNSUPPORTED", "BucketSpec", "Finding", "check_bucket", "create_bucket", "desired_state", "read_state"]

UNSUPPORTED = "not offered by this store"
_BY_ENTRY = ("policy", "lifecycle", "tags")  # compared entry by entry, on the entries that are s3kv's
_KEPT = ("ns/", "lease/", "format.json")  # at the root of a bucket others have folders beside these
_ARCHIVES = {"GLACIER", "DEEP_ARCHIVE"}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Finding:
    """One property of a bucket that is not what s3kv needs, and what to do about it."""

    property: str
    expected: str
    found: str
    remedy: str


def create_bucket(spec: BucketSpec, client: Any, *, sleep: Callable[[float], None] = real_sleep) -> list[str]:
    """Makes the bucket, or changes an existing one, until it is what `spec` says; the names of what was changed.

    A second call returns []. What the store does not offer is left out, and found by `check_bucket`. Raises
    ConfigError, before any change, when the bucket is in another region or versioned, or the credentials may not read
    its settings; Transient when S3 keeps failing. A call that fails midway has changed some properties and not the
    others, and may simply be repeated.
    """
    changed = []
    with translated(spec.name, spec.region):
        if not _exists(spec, client):
            where = {"CreateBucketConfiguration": {"LocationConstraint": spec.region}}
            client.create_bucket(Bucket=spec.name, **({} if spec.region == "us-east-1" else where))
            changed.append("bucket")
    found = read_state(spec, client)
    _refuse_unchangeable(spec, found)
    wanted = desired_state(spec, client.meta.partition)
    for name, write in _WRITERS.items():
        differs = found[name] != UNSUPPORTED and any(_differences(name, wanted[name], found[name]))
        if differs and _write(spec, client, write, sleep):
            changed.append(name)
    return changed


def check_bucket(spec: BucketSpec, client: Any, *, exact: bool = True) -> list[Finding]:
    """What is not as it should be; [] when all is well. Changes nothing.

    With `exact=False` a bucket that somebody set up with other choices is well too: other days, other encryption,
    other tags. Raises ConfigError when there is no such bucket or it cannot be read.
    """
    found = read_state(spec, client)
    wanted = desired_state(spec if exact else _adopting(spec, found), client.meta.partition)
    if not exact:
        wanted["tags"] = {}
    findings = [
        Finding(path, as_text(expected), as_text(actual), _remedy(name, actual))
        for name in wanted
        for path, expected, actual in _differences(name, wanted[name], found[name])
    ]
    return findings + list(_losses(spec, client))


def read_state(spec: BucketSpec, client: Any) -> dict[str, Any]:
    """Property -> what the bucket has, in the form of `desired_state`; UNSUPPORTED where the store has none."""
    readers: dict[str, Callable[[], Any]] = {
        "region": lambda: _region(spec, client),
        "versioning": lambda: _versioning(spec, client),
        "public_access_block": lambda: _public_access_block(spec, client),
        "ownership": lambda: _ownership(spec, client),
        "encryption": lambda: _encryption(spec, client),
        "policy": lambda: {each.get("Sid", ""): plain_statement(each) for each in _statements(spec, client)},
        "lifecycle": lambda: {each.get("ID", ""): plain_rule(each) for each in _rules(spec, client)},
        "tags": lambda: _tags(spec, client),
    }
    return {name: _read(spec, read) for name, read in readers.items()}


def _read(spec: BucketSpec, read: Callable[[], Any]) -> Any:
    try:
        with translated(spec.name, spec.region):
            return read()
    except Unsupported:
        return UNSUPPORTED


def _write(
    spec: BucketSpec, client: Any, write: Callable[[BucketSpec, Any], None], sleep: Callable[[float], None]
) -> bool:
    """False when the store does not offer it. S3 answers 409 while it still applies the change before."""
    retrying = Retrying(
        retry=retry_if_exception_type(Transient),
        stop=stop_after_attempt(6),
        wait=wait_random_exponential(multiplier=0.5, max=8),
        sleep=sleep,
        reraise=True,
    )
    try:
        for attempt in retrying:
            with attempt, translated(spec.name, spec.region):
                write(spec, client)
    except Unsupported:
        return False
    return True


def _exists(spec: BucketSpec, client: Any) -> bool:
    try:
        client.get_bucket_location(Bucket=spec.name)
    except ClientError as error:
        if error_code(error) == "NoSuchBucket":
            return False
        raise
    return True


def _refuse_unchangeable(spec: BucketSpec, found: Mapping[str, Any]) -> None:
    if found["region"] not in (spec.region, UNSUPPORTED):
        raise wrong_region(spec.name, found["region"], spec.region)
    if found["versioning"] not in ("off", UNSUPPORTED):
        raise StoreMisconfigured(
            f'bucket "{spec.name}" is versioned, so nothing in it is ever freed: suspend versioning, or set store.url'
            " to another bucket"
        )


# --- comparing -----------------------------------------------------------------------------------------------------


def _differences(name: str, wanted: Any, found: Any) -> Iterator[tuple[str, Any, Any]]:
    """(path, expected, found) of whatever differs."""
    if name not in _BY_ENTRY:
        if wanted != found:
            yield name, wanted, found
    elif found == UNSUPPORTED:
        if wanted:
            yield name, sorted(wanted), found
    else:
        for entry, value in wanted.items():
            if found.get(entry) != value:
                yield f"{name}.{entry}", value, found.get(entry, "missing")


def _adopting(spec: BucketSpec, found: Mapping[str, Any]) -> BucketSpec:
    """`spec` with the days and the encryption that the bucket has."""
    changes: dict[str, Any] = {}
    rules = found["lifecycle"] if found["lifecycle"] != UNSUPPORTED else {}
    for purpose, days, setting in (
        ("expire-cache", "expire_days", "expiry_days"),
        ("expire-leases", "expire_days", "lease_expiry_days"),
        ("abort-multipart", "abort_days", "abort_multipart_days"),
    ):
        if value := rules.get(spec.rule_id(purpose), {}).get(days):
            changes[setting] = value
    encryption = found["encryption"]
    if isinstance(encryption, dict) and encryption["algorithm"] in ("AES256", "aws:kms"):
        changes |= {
            "encryption": encryption["algorithm"],
            "kms_key": encryption["kms_key"] if encryption["algorithm"] == "aws:kms" else None,
            "bucket_key": encryption["bucket_key"],
        }
    return replace(spec, **changes)


def _remedy(name: str, found: Any) -> str:
    if found == UNSUPPORTED:
        return "nothing to do here if the store is private to its users; on AWS this is offered"
    return {
        "region": f"set store.region (or S3KV_STORE__REGION) to {found}",
        "versioning": "suspend versioning and delete old versions: s3kv never reads them",
    }.get(name, "run s3kv bucket create, or apply the Terraform module")


def _losses(spec: BucketSpec, client: Any) -> Iterator[Finding]:
    """Rules that archive s3kv's objects, and others' rules that delete them early: a cache that silently forgets."""
    ours = {rule["ID"] for rule in lifecycle_rules(spec)}
    kept = [spec.key_prefix + name for name in _KEPT]
    rules = _read(spec, lambda: _rules(spec, client))
    for rule in [] if rules == UNSUPPORTED else rules:
        plain = plain_rule(rule)
        reaches = any(plain["prefix"].startswith(each) or each.startswith(plain["prefix"]) for each in kept)
        if not plain["enabled"] or not reaches or plain["narrowed_by"]:
            continue
        archives = [each for each in rule.get("Transitions", []) if each.get("StorageClass") in _ARCHIVES]
        days = plain["expire_days"]
        if archives or (with_current_id(rule).get("ID") not in ours and days is not None and days < spec.expiry_days):
            yield Finding(
                property=f"lifecycle.{rule.get('ID', '')}",
                expected="no rule that archives s3kv's objects, or deletes them early",
                found=f"archives to {archives[0]['StorageClass']}" if archives else f"expires after {days} days",
                remedy="take that out of the rule, or narrow it to another prefix: to s3kv what is gone is a miss",
            )


# --- reading -------------------------------------------------------------------------------------------------------


def _or_absent(call: Callable[[], _T], absent: _T, *codes: str) -> _T:
    """S3 answers 404 with a code of its own for each configuration that was never set."""
    try:
        return call()
    except ClientError as error:
        if error_code(error) in codes:
            return absent
        raise


def _region(spec: BucketSpec, client: Any) -> str:
    location = client.get_bucket_location(Bucket=spec.name).get("LocationConstraint")
    if location:
        return "eu-west-1" if location == "EU" else str(location)
    # AWS leaves it out for us-east-1; other stores have no regions.
    return "us-east-1" if ".amazonaws.com" in client.meta.endpoint_url else spec.region


def _versioning(spec: BucketSpec, client: Any) -> str:
    # A bucket that was ever versioned can only be suspended; for new objects that is the same as off.
    return "on" if client.get_bucket_versioning(Bucket=spec.name).get("Status") == "Enabled" else "off"


def _public_access_block(spec: BucketSpec, client: Any) -> dict[str, bool]:
    found: dict[str, bool] = _or_absent(
        lambda: client.get_public_access_block(Bucket=spec.name)["PublicAccessBlockConfiguration"],
        {},
        "NoSuchPublicAccessBlockConfiguration",
    )
    return {name: bool(found.get(name)) for name in PUBLIC_ACCESS_BLOCK}


def _ownership(spec: BucketSpec, client: Any) -> str:
    rules: list[dict[str, Any]] = _or_absent(
        lambda: client.get_bucket_ownership_controls(Bucket=spec.name)["OwnershipControls"]["Rules"],
        [],
        "OwnershipControlsNotFoundError",
    )
    return str(rules[0]["ObjectOwnership"]) if rules else "missing"


def _encryption(spec: BucketSpec, client: Any) -> dict[str, Any] | str:
    rules: list[dict[str, Any]] = _or_absent(
        lambda: client.get_bucket_encryption(Bucket=spec.name)["ServerSideEncryptionConfiguration"]["Rules"],
        [],
        "ServerSideEncryptionConfigurationNotFoundError",
    )
    return plain_encryption(rules[0]) if rules else "missing"


def _statements(spec: BucketSpec, client: Any) -> list[dict[str, Any]]:
    document = _or_absent(lambda: client.get_bucket_policy(Bucket=spec.name)["Policy"], "{}", "NoSuchBucketPolicy")
    statements: list[dict[str, Any]] | dict[str, Any] = json.loads(document).get("Statement", [])
    return statements if isinstance(statements, list) else [statements]


def _rules(spec: BucketSpec, client: Any) -> list[dict[str, Any]]:
    return _or_absent(
        lambda: list(client.get_bucket_lifecycle_configuration(Bucket=spec.name).get("Rules", [])),
        [],
        "NoSuchLifecycleConfiguration",
    )


def _tags(spec: BucketSpec, client: Any) -> dict[str, str]:
    found: list[dict[str, str]] = _or_absent(
        lambda: client.get_bucket_tagging(Bucket=spec.name)["TagSet"], [], "NoSuchTagSet"
    )
    return {each["Key"]: each["Value"] for each in found}


# --- writing -------------------------------------------------------------------------------------------------------


def _write_public_access_block(spec: BucketSpec, client: Any) -> None:
    client.put_public_access_block(Bucket=spec.name, PublicAccessBlockConfiguration=PUBLIC_ACCESS_BLOCK)


def _write_ownership(spec: BucketSpec, client: Any) -> None:
    controls = {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]}
    client.put_bucket_ownership_controls(Bucket=spec.name, OwnershipControls=controls)


def _write_encryption(spec: BucketSpec, client: Any) -> None:
    rules = {"Rules": [default_encryption(spec)]}
    client.put_bucket_encryption(Bucket=spec.name, ServerSideEncryptionConfiguration=rules)


def _write_policy(spec: BucketSpec, client: Any) -> None:
    ours = policy_statements(spec, client.meta.partition)
    names = {each["Sid"] for each in ours}
    others = [each for each in _statements(spec, client) if each.get("Sid") not in names]
    policy = {"Version": "2012-10-17", "Statement": others + ours}
    client.put_bucket_policy(Bucket=spec.name, Policy=json.dumps(policy))


def _write_lifecycle(spec: BucketSpec, client: Any) -> None:
    before = [with_current_id(each) for each in _rules(spec, client)]
    ours = {each["ID"]: each for each in lifecycle_rules(spec)}
    for rule in before:  # the storage class is the owner's choice
        if rule.get("ID") in ours and rule.get("Transitions"):
            ours[rule["ID"]]["Transitions"] = rule["Transitions"]
    rules = [each for each in before if each.get("ID") not in ours] + list(ours.values())
    client.put_bucket_lifecycle_configuration(Bucket=spec.name, LifecycleConfiguration={"Rules": rules})


def _write_tags(spec: BucketSpec, client: Any) -> None:
    tags = {**_tags(spec, client), **spec.tags}
    pairs = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
    client.put_bucket_tagging(Bucket=spec.name, Tagging={"TagSet": pairs})


# In this order: nothing is open to the public while the rest is being set.
_WRITERS: dict[str, Callable[[BucketSpec, Any], None]] = {
    "public_access_block": _write_public_access_block,
    "ownership": _write_ownership,
    "encryption": _write_encryption,
    "policy": _write_policy,
    "lifecycle": _write_lifecycle,
    "tags": _write_tags,
}
