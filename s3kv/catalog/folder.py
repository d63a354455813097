"""The folder of one index: who may write it, and whether what lies there can be trusted.

lmdb runs without fsync, because the index is a cache of the bucket and an fsync would stall the agent. The kernel
keeps every page that was written before a process died, and a commit becomes visible by one small last write, so a
**crash of the process** at any point leaves the last whole commit. A **crash of the machine** may leave any mixture of
pages, which lmdb cannot always tell. So a marker beside the data says under which boot of the machine it is being
written; after a clean close (data synced first) it says so instead. A marker of another boot that is not clean means:
throw away, load again from the bucket (seconds).
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from s3kv.errors import ConfigError

DATA_FILES = ("data.mdb", "lock.mdb")
MARKER = "marker.json"
LOCK = "writer.lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Marker:
    """`boot` is the boot under which data was last opened for writing; `clean`: it was closed and synced after."""

    format: int
    identity: str
    boot: str
    clean: bool

    def trusted(self, format_number: int, identity: str, boot: str) -> bool:
        return self.format == format_number and self.identity == identity and (self.clean or self.boot == boot)


def boot_id() -> str:
    """An id of this boot of the machine, shared by its containers; "" where the kernel does not say (never trusted)."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_marker(folder: Path) -> Marker | None:
    """The marker, or None when there is none that can be understood."""
    try:
        marker = Marker(**json.loads((folder / MARKER).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return marker if marker.boot else None


def write_marker(folder: Path, marker: Marker) -> None:
    """Durable on return: the marker must be on disk before the first page it speaks of is written."""
    temporary = folder / (MARKER + ".new")
    with temporary.open("wb") as file:
        file.write(json.dumps(asdict(marker)).encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MARKER)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def lock_folder(folder: Path) -> IO[bytes]:
    """Makes the folder and takes its write lock, held while the returned file is open and at most until the process
    ends.

    Raises ConfigError when the folder cannot be made or another process writes the index.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")
    except OSError as error:
        raise ConfigError(f"catalog.index_dir: {folder} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"catalog.index_dir: {folder} is in use by another agent") from error
    return file


def wipe(folder: Path) -> None:
    """Removes marker and data. Readers that have the old files mapped keep them until they close."""
    for name in (MARKER, *DATA_FILES):
        (folder / name).unlink(missing_ok=True)
