"""The keys of format 1, relative to the configured prefix, and back from keys that anybody may have written.

Numbers in log and snapshot keys are hexadecimal of fixed width, so that the store's key order is their order in time.
Every `parse_…` answers None for a key that no builder here would make.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from s3kv.format.limits import ID_BYTES, MAX_GROUPS, U32, U64

FORMAT_KEY = "format.json"
NAMESPACES_PREFIX = "ns/"
LEASES_PREFIX = "lease/"

_NAME = re.compile(r"[0-9a-f]{32}")
_LEASE = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
_NAMESPACE_KEY = re.compile(r"ns/([0-9a-f]{32})/namespace\.json")
_CHUNK_KEY = re.compile(r"ns/([0-9a-f]{32})/chunk/([0-9a-f]{2})/(\2[0-9a-f]{30})/g(0|[1-9][0-9]?)")
_LOG_KEY = re.compile(r"ns/([0-9a-f]{32})/log/([0-9a-f]{16})-([0-9a-f]{8})-([0-9a-f]{8})")
_SNAP_KEY = re.compile(r"ns/([0-9a-f]{32})/snap/([0-9a-f]{16})-([0-9a-f]{16})")


class ChunkKey(NamedTuple):
    """`ns/<namespace>/chunk/<hh>/<chunk>/g<group>`: one layer group of one chunk."""

    namespace: str
    chunk_id: bytes
    group: int


class LogKey(NamedTuple):
    """`ns/<namespace>/log/<time_us>-<agent>-<seq>`: one catalog segment."""

    namespace: str
    time_us: int
    agent: int
    seq: int


class SnapKey(NamedTuple):
    """`ns/<namespace>/snap/<time_us>-<epoch>`: one catalog snapshot; `epoch` is one more than the highest known."""

    namespace: str
    time_us: int
    epoch: int


def namespace_prefix(namespace: str) -> str:
    """Prefix of everything of a namespace; `namespace` is its name of 32 hex digits, else ValueError."""
    if not _NAME.fullmatch(namespace):
        raise ValueError(f"namespace name {namespace!r} is not 32 lower-case hex digits")
    return f"{NAMESPACES_PREFIX}{namespace}/"


def namespace_key(namespace: str) -> str:
    return namespace_prefix(namespace) + "namespace.json"


def chunks_prefix(namespace: str) -> str:
    return namespace_prefix(namespace) + "chunk/"


def chunk_prefix(namespace: str, chunk_id: bytes) -> str:
    """Prefix of the objects (one per layer group) of one chunk."""
    if len(chunk_id) != ID_BYTES:
        raise ValueError(f"a chunk id has {ID_BYTES} bytes, not {len(chunk_id)}")
    digits = chunk_id.hex()
    return f"{chunks_prefix(namespace)}{digits[:2]}/{digits}/"


def chunk_key(namespace: str, chunk_id: bytes, group: int) -> str:
    _in_range("group", group, MAX_GROUPS - 1)
    return f"{chunk_prefix(namespace, chunk_id)}g{group}"


def log_prefix(namespace: str) -> str:
    return namespace_prefix(namespace) + "log/"


def log_key(namespace: str, time_us: int, agent: int, seq: int) -> str:
    _in_range("time_us", time_us, U64)
    _in_range("agent", agent, U32)
    _in_range("seq", seq, U32)
    return f"{log_prefix(namespace)}{time_us:016x}-{agent:08x}-{seq:08x}"


def log_start_after(namespace: str, time_us: int) -> str:
    """A `start_after` for listing the segments of `time_us` and later: it sorts before every key of that time."""
    return f"{log_prefix(namespace)}{max(0, min(time_us, U64)):016x}"


def snap_prefix(namespace: str) -> str:
    return namespace_prefix(namespace) + "snap/"


def snap_key(namespace: str, time_us: int, epoch: int) -> str:
    _in_range("time_us", time_us, U64)
    _in_range("epoch", epoch, U64)
    return f"{snap_prefix(namespace)}{time_us:016x}-{epoch:016x}"


def lease_key(name: str) -> str:
    if not _LEASE.fullmatch(name):
        raise ValueError(f"lease name {name!r} must match {_LEASE.pattern}")
    return LEASES_PREFIX + name


def parse_namespace_key(key: str) -> str | None:
    """The namespace's name, of the key of its `namespace.json`."""
    match = _NAMESPACE_KEY.fullmatch(key)
    return match[1] if match else None


def parse_chunk_key(key: str) -> ChunkKey | None:
    match = _CHUNK_KEY.fullmatch(key)
    if match is None or int(match[4]) >= MAX_GROUPS:
        return None
    return ChunkKey(match[1], bytes.fromhex(match[3]), int(match[4]))


def parse_log_key(key: str) -> LogKey | None:
    match = _LOG_KEY.fullmatch(key)
    return LogKey(match[1], int(match[2], 16), int(match[3], 16), int(match[4], 16)) if match else None


def parse_snap_key(key: str) -> SnapKey | None:
    match = _SNAP_KEY.fullmatch(key)
    return SnapKey(match[1], int(match[2], 16), int(match[3], 16)) if match else None


def parse_lease_key(key: str) -> str | None:
    """The lease's name."""
    name = key.removeprefix(LEASES_PREFIX)
    return name if key.startswith(LEASES_PREFIX) and _LEASE.fullmatch(name) else None


def _in_range(name: str, value: int, maximum: int) -> None:
    if not 0 <= value <= maximum:
        raise ValueError(f"{name} {value} is not in 0..{maximum}")
