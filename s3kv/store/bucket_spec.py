"""What a bucket has to be for s3kv: plain values, no I/O.

`desired_state` says it once for `s3kv bucket create`, for `s3kv bucket check` and, by a test that compares the results,
for the Terraform module. Why the lifecycle rules are what they are: `terraform/README.md`, "Lifecycle".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from s3kv.errors import ConfigError
from s3kv.store.keys import SCRATCH_PREFIX

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"([A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*)?")

SCRATCH_EXPIRY_DAYS = 1
_FOLDERS = {"abort-multipart": "", "expire-cache": "ns/", "expire-leases": "lease/", "expire-scratch": SCRATCH_PREFIX}
"""What each lifecycle rule is for -> the part of the prefix that it applies to."""
PUBLIC_ACCESS_BLOCK = {
    "BlockPublicAcls": True,
    "IgnorePublicAcls": True,
    "BlockPublicPolicy": True,
    "RestrictPublicBuckets": True,
}


@dataclass(frozen=True)
class BucketSpec:
    """A bucket as s3kv wants it. Raises ConfigError where the values contradict each other.

    `kms_key` is the ARN of a key; None with `encryption="aws:kms"` means the AWS managed key. `tags` must be on the
    bucket; others may be there too. `tls_only=False` is for S3-compatible stores that are reached over plain HTTP.
    """

    name: str
    region: str
    prefix: str = "s3kv"
    encryption: Literal["AES256", "aws:kms"] = "AES256"
    kms_key: str | None = None
    bucket_key: bool = True
    expiry_days: int = 90
    lease_expiry_days: int = 30
    abort_multipart_days: int = 1
    tags: Mapping[str, str] = field(default_factory=lambda: {"Application": "s3kv"})
    tls_only: bool = True

    def __post_init__(self) -> None:
        if self.name.endswith("--x-s3"):
            raise ConfigError(f'store.url names the directory bucket "{self.name}": the Terraform module makes these')
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f'store.url: "{self.name}" is not a name that a bucket can have')
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(f'store.url: "{self.prefix}" is not a prefix of plain names between single slashes')
        if self.kms_key is not None and self.encryption != "aws:kms":
            raise ConfigError('a KMS key needs the encryption "aws:kms"')
        if min(self.expiry_days, self.lease_expiry_days, self.abort_multipart_days) < 1:
            raise ConfigError("expiry and abort days must be 1 or more")

    @property
    def key_prefix(self) -> str:
        """What every key begins with: `<prefix>/`, or nothing."""
        return f"{self.prefix}/" if self.prefix else ""

    def rule_id(self, purpose: str) -> str:
        """Name of a lifecycle rule; two prefixes of one bucket have rules of different names."""
        return _rule_id(purpose, self.prefix)


def _rule_id(purpose: str, prefix: str) -> str:
    """Rules may be named without slashes alone, so the digest tells `a/b` from `a-b`."""
    digest = f"-{hashlib.sha256(prefix.encode()).hexdigest()[:8]}" if "/" in prefix else ""
    return _rule_id_without_digest(purpose, prefix) + digest


def _rule_id_without_digest(purpose: str, prefix: str) -> str:
    return f"s3kv-{purpose}" + (f"-{prefix.replace('/', '-')}" if prefix else "")


def with_current_id(rule: dict[str, Any]) -> dict[str, Any]:
    """A rule from before digests under the name that it has now; any other as it is."""
    where = plain_rule(rule)["prefix"]
    for purpose, folder in _FOLDERS.items():
        prefix = where.removesuffix(f"/{folder}")
        if "/" in prefix and prefix != where and rule.get("ID") == _rule_id_without_digest(purpose, prefix):
            return {**rule, "ID": _rule_id(purpose, prefix)}
    return rule


def lifecycle_rules(spec: BucketSpec) -> list[dict[str, Any]]:
    """The backstop: boto3's form of the four rules."""
    actions = {
        "abort-multipart": {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": spec.abort_multipart_days}},
        "expire-cache": {"Expiration": {"Days": spec.expiry_days}},
        "expire-leases": {"Expiration": {"Days": spec.lease_expiry_days}},
        "expire-scratch": {"Expiration": {"Days": SCRATCH_EXPIRY_DAYS}},
    }
    return [
        {
            "ID": spec.rule_id(purpose),
            "Status": "Enabled",
            "Filter": {"Prefix": spec.key_prefix + folder},
            **actions[purpose],
        }
        for purpose, folder in _FOLDERS.items()
    ]


def policy_statements(spec: BucketSpec, partition: str = "aws") -> list[dict[str, Any]]:
    """Statements that refuse plain HTTP and TLS older than 1.2."""
    if not spec.tls_only:
        return []
    bucket = f"arn:{partition}:s3:::{spec.name}"
    refused = {"Effect": "Deny", "Principal": "*", "Action": "s3:*", "Resource": [bucket, f"{bucket}/*"]}
    return [
        {"Sid": "S3kvDenyInsecureTransport", **refused, "Condition": {"Bool": {"aws:SecureTransport": "false"}}},
        {"Sid": "S3kvDenyOldTls", **refused, "Condition": {"NumericLessThan": {"s3:TlsVersion": "1.2"}}},
    ]


def default_encryption(spec: BucketSpec) -> dict[str, Any]:
    """boto3's form of the one encryption rule."""
    rule: dict[str, Any] = {"SSEAlgorithm": spec.encryption}
    if spec.kms_key is not None:
        rule["KMSMasterKeyID"] = spec.kms_key
    is_kms = spec.encryption == "aws:kms"
    return {"ApplyServerSideEncryptionByDefault": rule, "BucketKeyEnabled": is_kms and spec.bucket_key}


def desired_state(spec: BucketSpec, partition: str = "aws") -> dict[str, Any]:
    """Property -> value, in the form that `s3kv.store.admin.read_state` gives for a bucket.

    `policy` is by statement, `lifecycle` by rule, `tags` by key: what else is in these is not s3kv's.
    """
    return {
        "region": spec.region,
        "versioning": "off",
        "public_access_block": PUBLIC_ACCESS_BLOCK,
        "ownership": "BucketOwnerEnforced",
        "encryption": plain_encryption(default_encryption(spec)),
        "policy": {each["Sid"]: plain_statement(each) for each in policy_statements(spec, partition)},
        "lifecycle": {each["ID"]: plain_rule(each) for each in lifecycle_rules(spec)},
        "tags": dict(spec.tags),
    }


def plain_encryption(rule: Mapping[str, Any]) -> dict[str, Any]:
    """An encryption rule without what stores add or leave out at will; a bucket key says nothing without KMS."""
    default = rule.get("ApplyServerSideEncryptionByDefault", {})
    return {
        "algorithm": default.get("SSEAlgorithm"),
        "kms_key": default.get("KMSMasterKeyID") or None,
        "bucket_key": default.get("SSEAlgorithm") == "aws:kms" and bool(rule.get("BucketKeyEnabled")),
    }


def plain_statement(statement: Mapping[str, Any]) -> dict[str, Any]:
    """A policy statement in one spelling: IAM takes a string for a list of one, and `"*"` for `{"AWS": "*"}`."""
    plain = {key: value for key, value in statement.items() if key != "Sid"}
    for key in ("Action", "Resource"):
        if key in plain:
            plain[key] = _sorted_list(plain[key])
    if plain.get("Principal") in ({"AWS": "*"}, {"AWS": ["*"]}):
        plain["Principal"] = "*"
    conditions = plain.get("Condition", {})
    plain["Condition"] = {
        test: {key: _sorted_list(values) for key, values in operands.items()} for test, operands in conditions.items()
    }
    return plain


def plain_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """What a lifecycle rule does to objects, but for transitions: the storage class is the owner's choice."""
    where = rule.get("Filter", {})
    where = where.get("And", where)
    return {
        "enabled": rule.get("Status") == "Enabled",
        "prefix": where.get("Prefix", rule.get("Prefix", "")),
        "narrowed_by": sorted(set(where) - {"Prefix"}),
        "expire_days": rule.get("Expiration", {}).get("Days"),
        "abort_days": rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation"),
    }


def _sorted_list(value: object) -> list[str]:
    values: Iterable[object] = value if isinstance(value, list) else [value]
    return sorted("true" if each is True else "false" if each is False else str(each) for each in values)


def as_text(value: object) -> str:
    """A value for a person to read in one line."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
