"""The system calls under `LocalStore`: whole files in, whole files out, errors translated."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from s3kv.errors import CorruptData, NotFound, PermissionDenied, StoreError, StoreMisconfigured, Transient
from s3kv.store.base import ObjectMeta
from s3kv.store.reads import check_size

PUBLISH_TRIES = 50
_IOV_MAX = 1024


def make_folder(folder: Path) -> None:
    """With every missing parent, all private: `mkdir(parents=True)` would leave the parents to the umask.

    Raises FileNotFoundError when a delete takes the parent away meanwhile: try again.
    """
    try:
        _make_one(folder)
    except FileNotFoundError:
        make_folder(folder.parent)
        _make_one(folder)


def _make_one(folder: Path) -> None:
    """Not `exist_ok`: that raises FileExistsError for a folder that a delete takes away at just that moment."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):  # one look: between two it may go away and come back
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None


def publish(name: Callable[[Path, Path], None], staged: Path, path: Path, root: Path) -> None:
    """Give the staged file its name. A delete may take an empty folder away between mkdir and rename: try again."""
    for left in reversed(range(PUBLISH_TRIES)):
        try:
            make_folder(path.parent)
            return name(staged, path)
        except FileNotFoundError:
            if not left or not root.exists():
                raise
    raise AssertionError


def write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    pending = list(parts)
    while pending:
        written = os.writev(descriptor, pending[:_IOV_MAX])
        while pending and written >= pending[0].nbytes:
            written -= pending.pop(0).nbytes
        if written:
            pending[0] = pending[0][written:]


def read_ranges(path: Path, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
    with translated(key):
        descriptor = _open(path)
        try:
            for (offset, length), out in zip(ranges, outs, strict=True):
                if _read_fully(descriptor, out, offset) < length:
                    raise CorruptData(f"object {key} ends before {offset + length}")
        finally:
            os.close(descriptor)


def _read_fully(descriptor: int, out: memoryview, offset: int) -> int:
    done = 0
    while done < out.nbytes and (got := os.preadv(descriptor, [out[done:]], offset + done)):
        done += got
    return done


def read_whole(path: Path, key: str, max_bytes: int) -> tuple[bytes, str]:
    with translated(key):
        descriptor = _open(path)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            check_size(key, status.st_size, max_bytes)
            return file.readall(), etag_of(status)


def _open(path: Path) -> int:
    """Never follows a link out of the folder, never waits for a pipe's other end, never opens a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except NotADirectoryError as error:  # a part of the key is an object
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return descriptor


def head(path: Path, key: str) -> ObjectMeta:
    meta = meta_or_none(path, key)
    if meta is None:
        raise NotFound(f"no object {key}")
    return meta


def meta_or_none(path: Path, key: str) -> ObjectMeta | None:
    with translated(key):
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return ObjectMeta(key, status.st_size, etag_of(status), status.st_mtime_ns / 1e9)


def etag_of(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def sync_folder(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # deleted again already: nothing to keep
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def refuse_foreign_folder(root: Path) -> None:
    """In a folder where anybody may create names (/tmp), a folder that another user made first is a trap."""
    for folder in (root, *root.parents):
        if not folder.exists() or not folder.parent.exists():
            continue
        above, own = folder.parent.stat(), folder.stat()
        open_to_all = above.st_mode & stat.S_IWOTH
        if open_to_all and own.st_uid not in (0, os.geteuid()):
            raise StoreMisconfigured(f"store.url (or S3KV_STORE__URL): folder {folder} belongs to another user")


@contextlib.contextmanager
def translated(key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _translate(error, key) from error


def _translate(error: OSError, key: str) -> StoreError:
    reason = f"{key or 'the folder'}: {error.strerror}"
    if error.errno in (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENXIO):
        return NotFound(f"no object {key}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDenied(f"store.url (or S3KV_STORE__URL): no permission for {reason}")
    if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG):
        return StoreError(f"{key} cannot be a file here: {error.strerror}")
    return Transient(f"file store, {reason}")  # a full disk, too many open files, a network file system's trouble
