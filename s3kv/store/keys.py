"""Names: which keys, prefixes and `store.url`s there are. Pure.

`+ = % space` and every printable non-ASCII character survive on every backend (each is in the conformance suite). What
some backend cannot carry is refused here, before a request: empty, `.` and `..` parts, control characters, lone
surrogates, and backslashes (SeaweedFS takes them for slashes).
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from s3kv.errors import ConfigError

KEY_MAX_BYTES = 1024
"""Longest key of S3 with the prefix, in UTF-8 bytes."""
PART_MAX_BYTES = 255
"""Longest part between slashes: a file name on Linux."""
PREFIX_MAX_BYTES = 512
"""Longest prefix in `store.url`, so that the longest key of format 1 fits behind it."""
PRIVATE_FOLDER = ".s3kv"
"""Where a folder store keeps files of its own: below it no store has objects."""
SCRATCH_PREFIX = "s3kv-scratch/"
"""Where a store is tried out. A lifecycle rule empties it: nodes may put objects there and not delete them. The name is
one that nobody else has at the root of a bucket."""
EXPRESS_SUFFIX = "--x-s3"
"""Directory buckets (S3 Express One Zone) are named so by AWS."""

Scheme = Literal["file", "memory", "s3"]


@dataclass(frozen=True, slots=True)
class Location:
    """`store.url` taken apart: bucket (s3), folder (file) or name (memory), and the prefix without a closing slash."""

    scheme: Scheme
    root: str
    prefix: str

    @property
    def express(self) -> bool:
        """A directory bucket: listings are unordered, take no start-after, and their prefixes end with "/"."""
        return self.scheme == "s3" and self.root.endswith(EXPRESS_SUFFIX)


def why_bad_key(key: str) -> str | None:
    """Why `key` cannot be a key, or None when it can."""
    if key.partition("/")[0] == PRIVATE_FOLDER:
        return f"is in {PRIVATE_FOLDER}/, where a folder store keeps files of its own"
    return why_bad_path(key)


def why_bad_path(path: str) -> str | None:
    """Why `path` can be no part of a key, or None when it can."""
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if not encoded or len(encoded) > KEY_MAX_BYTES:
        return f"is empty or longer than {KEY_MAX_BYTES} bytes"
    if any(char == "\\" or unicodedata.category(char) in ("Cc", "Cs") for char in path):
        return "has control characters or backslashes"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return 'has an empty, "." or ".." part'
        if len(part.encode("utf-8")) > PART_MAX_BYTES:
            return f"has a part longer than {PART_MAX_BYTES} bytes"
    return None


def check_key(key: str) -> str:
    """`key` itself. Raises ValueError when it cannot be a key."""
    if reason := why_bad_key(key):
        raise ValueError(f"key {key!r} {reason}")
    return key


def check_start_after(key: str | None) -> str:
    """`key` itself, "" for None. Raises ValueError when it is neither None nor a key."""
    return "" if key is None else check_key(key)


def check_prefix(prefix: str) -> str:
    """`prefix` itself: empty, or a key followed by "/". Raises ValueError otherwise."""
    if prefix == "":
        return prefix
    if not prefix.endswith("/"):
        raise ValueError(f'prefix {prefix!r} does not end with "/"')
    check_key(prefix[:-1])
    return prefix


def parse_url(url: str) -> Location:
    """`store.url` as a location. Names are taken as they stand: `%20` is three characters, not a space.

    Raises ConfigError, one sentence that names the setting.
    """
    scheme, separator, rest = url.partition("://")
    if separator:
        if scheme == "s3":
            return _parse_s3(url, rest)
        if scheme == "file":
            return Location("file", str(_parse_folder(url, rest)), "")
        if scheme == "memory":
            return Location("memory", rest, "")
    raise _bad(url, "must begin with s3://, file:// or memory://")


def _parse_s3(url: str, rest: str) -> Location:
    bucket, _, prefix = rest.partition("/")
    if not bucket or any(char.isspace() or char in "?#%@:" for char in bucket):
        raise _bad(url, "must name a bucket: s3://bucket/prefix")
    prefix = prefix.rstrip("/")
    if prefix and (reason := why_bad_path(prefix)):
        raise _bad(url, f"has a prefix that {reason}")
    if len(prefix.encode("utf-8")) > PREFIX_MAX_BYTES:
        raise _bad(url, f"has a prefix longer than {PREFIX_MAX_BYTES} bytes")
    return Location("s3", bucket, prefix)


def _parse_folder(url: str, rest: str) -> Path:
    if not rest.startswith("/") or rest.strip("/") == "":
        raise _bad(url, "must name an absolute folder: file:///folder")
    if reason := why_bad_path(rest.strip("/")):
        raise _bad(url, f"names a folder that {reason}")
    return Path(rest)


def _bad(url: str, reason: str) -> ConfigError:
    return ConfigError(f"store.url (or S3KV_STORE__URL) {reason}, not {url!r}")
