"""What this machine lets the tier have: memory, its control group's limit, locked memory, shared memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
SHARED_MEMORY = Path("/dev/shm")
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. None: no limit, or the kernel does not say."""

    total: int | None
    available: int | None
    control_group: int | None
    locked: int | None


def read_host_memory(
    read: Callable[[Path], str] = lambda path: path.read_text(encoding="ascii"),
    locked: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
) -> HostMemory:
    fields = _meminfo(read)
    limit = locked()
    return HostMemory(
        total=fields.get("MemTotal"),
        available=fields.get("MemAvailable"),
        control_group=_control_group(read),
        locked=None if limit == resource.RLIM_INFINITY else limit,
    )


def _meminfo(read: Callable[[Path], str]) -> dict[str, int]:
    try:
        lines = read(MEMINFO).splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in pairs if len(parts) >= 2 and parts[1].isdigit()}


def _control_group(read: Callable[[Path], str]) -> int | None:
    for path in CGROUP_LIMITS:
        try:
            text = read(path).strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return None
