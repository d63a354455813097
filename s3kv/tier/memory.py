"""How much host memory this process can still get, by the machine's and its control groups' word.

Facts: proc(5) MemAvailable; the kernel's cgroup-v2.rst (`memory.max`, `memory.current`, `inactive_file` of
`memory.stat`) and cgroup-v1/memory.rst (`memory.limit_in_bytes`, `memory.usage_in_bytes`, `total_inactive_file`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from s3kv.errors import ConfigError

MARGIN_FRACTION = 0.05
"""Of what is available, left for everything else on the node."""


def check_available(nbytes: int, root: Path = Path("/")) -> None:
    """Raises ConfigError naming `tier.capacity_bytes` unless `nbytes` fit with a margin. Unknown counts as enough."""
    available = available_bytes(root)
    if available is None:
        return
    usable = int(available * (1 - MARGIN_FRACTION))
    if nbytes > usable:
        raise ConfigError(
            f"tier.capacity_bytes: {nbytes} bytes were asked for, but this machine (or its control group) has "
            f"{usable} to give; set it lower"
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """The tightest of all limits that apply to this process; None if the machine tells nothing."""
    figures = [*_machine(root), *_control_groups(root)]
    return max(0, min(figures)) if figures else None


def _machine(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and rest.split():
            yield int(rest.split()[0]) * 1024


def _control_groups(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "memory":
            yield from _limits(root / "sys/fs/cgroup/memory", path, V1_FILES)
        elif not controllers:
            yield from _limits(root / "sys/fs/cgroup", path, V2_FILES)


V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2_FILES = ("memory.max", "memory.current", "inactive_file")


def _limits(mount: Path, path: str, files: tuple[str, str, str]) -> Iterator[int]:
    """What every group from this one up to the root still allows.

    In a container the path may be the host's while the mount shows the container's own group as its root: folders that
    are missing are passed over.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit, used = _number(folder / files[0]), _number(folder / files[1])
        if limit is not None and used is not None:
            yield limit - used + _reclaimable(folder / "memory.stat", files[2])


def _reclaimable(stat: Path, field: str) -> int:
    """File cache that the kernel drops first when memory is short."""
    for line in _read(stat).splitlines():
        name, _, value = line.partition(" ")
        if name == field and value.isdigit():
            return int(value)
    return 0


def _number(file: Path) -> int | None:
    """None where there is no such file or no limit ("max")."""
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
