"""What this machine lets the tier have: memory, its control groups' limits, locked memory.

Facts: proc(5) MemTotal and MemAvailable; the kernel's cgroup-v2.rst (`memory.max`, `memory.current`, `inactive_file` of
`memory.stat`) and cgroup-v1/memory.rst (`memory.limit_in_bytes`, `memory.usage_in_bytes`, `total_inactive_file`).
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MEMINFO = Path("/proc/meminfo")
OWN_CONTROL_GROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60

Read = Callable[[Path], str]
"""The text of a file of the kernel's. Raises OSError where there is none."""


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Where a version of control groups is mounted, and what it calls its figures."""

    mount: Path
    limit: str
    used: str
    reclaimable: str


V1 = _Hierarchy(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = _Hierarchy(Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. None: no limit, or the kernel does not say."""

    total: int | None
    available: int | None
    control_group: int | None
    locked: int | None


def reader_below(root: Path) -> Read:
    """Reads the files of the machine whose root folder is `root`. Paths of control groups may have any bytes."""
    return lambda path: (root / path.relative_to("/")).read_text(encoding="ascii", errors="replace")


def read_host_memory(
    read: Read = reader_below(Path("/")),
    locked: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
) -> HostMemory:
    fields = meminfo(read)
    limit = locked()
    return HostMemory(
        total=fields.get("MemTotal"),
        available=fields.get("MemAvailable"),
        control_group=_control_group(read),
        locked=None if limit == resource.RLIM_INFINITY else limit,
    )


def meminfo(read: Read) -> dict[str, int]:
    """The machine's figures in bytes, by the kernel's names for them."""
    pairs = (line.split() for line in _text(read, MEMINFO).splitlines())
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in pairs if len(parts) >= 2 and parts[1].isdigit()}


def control_group_rooms(read: Read) -> Iterator[int]:
    """Bytes that each control group of this process, and each above it, still allows."""
    for line in _text(read, OWN_CONTROL_GROUPS).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "memory":
            yield from _rooms(read, V1, path)
        elif not controllers:
            yield from _rooms(read, V2, path)


def _rooms(read: Read, hierarchy: _Hierarchy, path: str) -> Iterator[int]:
    """What every group from this one up to the root still allows.

    In a container the path may be the host's while the mount shows the container's own group as its root: folders that
    are missing are passed over.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for depth in range(len(parts), -1, -1):
        folder = hierarchy.mount.joinpath(*parts[:depth])
        limit, used = _number(read, folder / hierarchy.limit), _number(read, folder / hierarchy.used)
        if limit is not None and used is not None:
            yield limit - used + _reclaimable(read, folder / "memory.stat", hierarchy.reclaimable)


def _reclaimable(read: Read, stat: Path, field: str) -> int:
    """File cache that the kernel drops first when memory is short."""
    for line in _text(read, stat).splitlines():
        name, _, value = line.partition(" ")
        if name == field and value.isdigit():
            return int(value)
    return 0


def _control_group(read: Read) -> int | None:
    """The limit of the group at the root of the mount, which in a container is the container's own."""
    for hierarchy in (V2, V1):
        limit = _number(read, hierarchy.mount / hierarchy.limit)
        if limit is not None and limit < _NO_LIMIT:
            return limit
    return None


def _number(read: Read, file: Path) -> int | None:
    """None where there is no such file or no limit ("max")."""
    text = _text(read, file).strip()
    return int(text) if text.isdigit() else None


def _text(read: Read, file: Path) -> str:
    try:
        return read(file)
    except OSError:
        return ""
