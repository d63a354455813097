"""Objects as files below one folder: one node, a shared file system, tests.

Own code instead of obstore's LocalStore, because that one has no `put_if_match`, no fsync, leaves folders to the umask,
and hands out buffers of its own where `preadv` reads straight into a slot.

How the promises are kept: a body is written to a file of its own in `.s3kv/staging` of the same file system and then
renamed (put) or hard-linked (put_if_absent: atomic, also against other processes and on NFS) to its name, so no reader
ever sees a part. `put_if_match` compares and renames under a lock file; it is exact against every other `put_if_match`
and `put_if_absent`, but not against a plain put or delete of the same key.

The trade-off: objects up to `FSYNC_MAX_BYTES` (catalog segments, leases, descriptions) are synced, file and folder,
before a put returns. Larger ones (chunks) are not: they survive any crash of processes, but a crash of the machine
within the kernel's write-back time (some 30 s) may leave one missing, short or zeroed although its record exists. Every
block is checked before it is offered, so that is a miss and is repaired; syncing each would cost a flush per chunk.

A key cannot be an object and a folder of others at once (`a` and `a/b`); format 1 has no such keys. A file system that
hangs holds the call past its deadline, since a thread cannot be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from s3kv.errors import AlreadyExists, PreconditionFailed, StoreError, StoreMisconfigured, Transient
from s3kv.store.base import LIST_PAGE_KEYS, Body, Capabilities, DeleteError, Failures, Names, ObjectMeta, Page
from s3kv.store.buffers import body_parts, body_size, check_ranges, in_thread
from s3kv.store.files import (
    etag_of,
    head,
    make_folder,
    meta_or_none,
    publish,
    read_ranges,
    read_whole,
    refuse_foreign_folder,
    sync_folder,
    translated,
    write_all,
)
from s3kv.store.keys import PRIVATE_FOLDER, check_key, check_prefix, check_start_after, why_bad_path
from s3kv.store.reads import DerivedReads
from s3kv.store.threads import StartedThreads

FSYNC_MAX_BYTES = 256 << 10
"""Larger objects are not synced (see above)."""
STAGING_MAX_AGE_S = 24 * 3600.0
"""Files in staging older than this were left by a crash and are removed when the folder is opened."""
_THREADS = 16
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_LOCK_TRIES = 400
_LOCK_PAUSE_S = 0.005


class LocalStore(DerivedReads):
    """`root` is created with mode 0700 when it is missing. `clock_ns` stamps objects, in ns since the epoch."""

    def __init__(
        self,
        root: Path,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        page_keys: int = LIST_PAGE_KEYS,
    ) -> None:
        self._root = root
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._page_keys = page_keys
        self._staging = root / PRIVATE_FOLDER / "staging"
        self._lock_path = root / PRIVATE_FOLDER / "lock"
        self._numbers = itertools.count()
        self._make_staging()
        with _usable(root):
            self._remove_old_staging()
        self._executor = StartedThreads(_THREADS, "s3kv-local-store", "store.url")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_put=True, conditional_match=True)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
        flat = check_ranges(ranges, outs)
        path = self._path(key)
        if any(out.nbytes for out in flat):
            await in_thread(self._executor, read_ranges, path, key, list(ranges), flat)

    async def get_with_etag(self, key: str, max_bytes: int) -> tuple[bytes, str]:
        return await in_thread(self._executor, read_whole, self._path(key), key, max_bytes)

    async def put(self, key: str, body: Body) -> str:
        return await in_thread(self._executor, self._write, key, body_parts(body), os.replace)

    async def put_if_absent(self, key: str, body: Body) -> str:
        return await in_thread(self._executor, self._write, key, body_parts(body), os.link)

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        parts = body_parts(body)
        for _ in range(_LOCK_TRIES):
            done = await in_thread(self._executor, self._write_if_match, key, parts, etag)
            if done is not None:
                return done
            await self._sleep(_LOCK_PAUSE_S)
        raise Transient(f"another process holds {self._lock_path}")

    async def head(self, key: str) -> ObjectMeta:
        return await in_thread(self._executor, head, self._path(key), key)

    async def list(self, prefix: str, start_after: str | None = None) -> AsyncIterator[Page]:
        entries = self._walk(check_prefix(prefix), check_start_after(start_after))
        while page := await in_thread(self._executor, _take, entries, self._page_keys):
            yield page

    async def list_prefixes(self, prefix: str) -> Names:
        return await in_thread(self._executor, self._folders, check_prefix(prefix))

    async def delete(self, keys: Sequence[str]) -> Failures:
        paths = [(key, self._path(key)) for key in keys]
        return await in_thread(self._executor, self._delete, paths)

    async def close(self) -> None:
        self._executor.shutdown(wait=False)

    # The rest runs in threads.

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _write(self, key: str, parts: Sequence[memoryview], name: Callable[[Path, Path], None]) -> str:
        path = self._path(key)
        staged = self._staging / f"{os.getpid()}-{next(self._numbers)}-{secrets.token_hex(6)}"
        with translated(key):
            try:
                etag, synced = self._stage(staged, parts)
                publish(name, staged, path, self._root)
                if synced:
                    sync_folder(path.parent)
                return etag
            except FileExistsError as error:
                raise AlreadyExists(f"object {key} exists") from error
            except FileNotFoundError as error:
                raise Transient(f"folder {self._root} was taken away during a put (store.url)") from error
            finally:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    staged.unlink()

    def _stage(self, staged: Path, parts: Sequence[memoryview]) -> tuple[str, bool]:
        descriptor = self._open_own(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        try:
            write_all(descriptor, parts)
            now = self._clock_ns()
            os.utime(descriptor, ns=(now, now))  # nanoseconds of our own: the kernel's are as coarse as its tick
            synced = body_size(parts) <= FSYNC_MAX_BYTES
            if synced:
                os.fsync(descriptor)
            return etag_of(os.fstat(descriptor)), synced
        finally:
            os.close(descriptor)

    def _write_if_match(self, key: str, parts: Sequence[memoryview], etag: str) -> str | None:
        """The new etag, or None while another process holds the lock."""
        path = self._path(key)
        with translated(key), os.fdopen(self._open_own(self._lock_path, _LOCK_FLAGS)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            try:
                held = etag_of(path.stat())
            except (FileNotFoundError, NotADirectoryError):
                held = None
            if held != etag:
                raise PreconditionFailed(f"object {key} has changed")
            return self._write(key, parts, os.replace)

    def _walk(self, prefix: str, start_after: str) -> Iterator[ObjectMeta]:
        """Objects in key order. Folders sort with their "/", and those wholly before `start_after` are not entered."""
        names = [
            (entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name) for entry in self._scan(prefix)
        ]
        for name in sorted(names):
            key = prefix + name
            if name.endswith("/"):
                if key > start_after or start_after.startswith(key):
                    yield from self._walk(key, start_after)
            elif key > start_after and (meta := meta_or_none(self._root / key, key)):
                yield meta

    def _scan(self, prefix: str) -> Sequence[os.DirEntry[str]]:
        with translated(prefix):
            try:
                with os.scandir(self._root / prefix) as entries:
                    return [
                        entry
                        for entry in entries
                        if why_bad_path(entry.name) is None and not (prefix == "" and entry.name == PRIVATE_FOLDER)
                    ]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def _folders(self, prefix: str) -> Names:
        names = [entry.name for entry in self._scan(prefix) if entry.is_dir(follow_symlinks=False)]
        return [
            f"{prefix}{name}/"
            for name in sorted(names, key=lambda name: name + "/")
            if self._has_objects(f"{prefix}{name}/")
        ]

    def _has_objects(self, prefix: str) -> bool:
        return next(self._walk(prefix, ""), None) is not None

    def _delete(self, paths: Sequence[tuple[str, Path]]) -> Failures:
        failures: Failures = []
        for key, path in paths:
            try:
                with translated(key), contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    path.unlink()
                    self._remove_empty_folders(path.parent)
            except StoreError as error:
                failures.append(DeleteError(key, error))
        return failures

    def _remove_empty_folders(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # not empty, or somebody else was first
            while folder != self._root:
                folder.rmdir()
                folder = folder.parent

    def _make_staging(self) -> None:
        with _usable(self._root):
            refuse_foreign_folder(self._root)
            make_folder(self._staging)

    def _open_own(self, path: Path, flags: int) -> int:
        """A file in `.s3kv`, which is made again: who cleans /tmp takes away what was not touched for days."""
        try:
            return os.open(path, flags, 0o600)
        except (FileNotFoundError, NotADirectoryError):
            self._make_staging()
            return os.open(path, flags, 0o600)

    def _remove_old_staging(self) -> None:
        oldest = self._clock_ns() / 1e9 - STAGING_MAX_AGE_S
        for path in self._staging.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


@contextlib.contextmanager
def _usable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreMisconfigured(
            f"store.url (or S3KV_STORE__URL): folder {root} cannot be used: {error.strerror}"
        ) from error


def _take(entries: Iterator[ObjectMeta], count: int) -> list[ObjectMeta]:
    return list(itertools.islice(entries, count))
