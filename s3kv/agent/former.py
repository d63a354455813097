"""Memory of agents that have ended: their engines keep it, and the next agent may lack it."""

from __future__ import annotations

from pathlib import Path

from s3kv.errors import ConfigError
from s3kv.tier.memory import check_available

_ARENA = "/memfd:s3kv-arena"
_SHOWN = 8


def check_memory(nbytes: int, root: Path = Path("/")) -> None:
    """As `check_available`; the error also says which processes have arenas mapped already."""
    try:
        check_available(nbytes)
    except ConfigError as error:
        sizes, processes = mapped_arenas(root)
        if not processes:
            raise
        named = ", ".join(map(str, processes[:_SHOWN])) + (" and others" if len(processes) > _SHOWN else "")
        raise ConfigError(
            f"{error}. Arenas of {sizes} bytes are mapped already, by processes {named}: an engine keeps that of an "
            "agent that has ended while it may load from it, and with several ranks until the next agent's first offer"
        ) from error


def mapped_arenas(root: Path = Path("/")) -> tuple[int, list[int]]:
    """(bytes of all arenas that processes have mapped, those processes), as far as this user may see."""
    sizes: dict[str, int] = {}
    processes: list[int] = []
    for maps in sorted(root.glob("proc/[0-9]*/maps")):
        try:
            found = [line.split() for line in maps.read_text(errors="replace").splitlines() if _ARENA in line]
        except OSError:  # it has ended, or is another user's
            continue
        for addresses, _, _, _, inode, *_ in found:
            begin, _, end = addresses.partition("-")
            sizes[inode] = max(sizes.get(inode, 0), int(end, 16) - int(begin, 16))
        if found:
            processes.append(int(maps.parent.name))
    return sum(sizes.values()), sorted(processes)
