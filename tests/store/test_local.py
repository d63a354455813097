"""What only a folder has: permissions, crashes, other processes, a full disk."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from s3kv.errors import NotFound, PermissionDenied, PreconditionFailed, StoreError, StoreMisconfigured, Transient
from s3kv.settings import StoreSettings
from s3kv.store import open_store
from s3kv.store.local import FSYNC_MAX_BYTES, STAGING_MAX_AGE_S, LocalStore
from s3kv.store.testing import all_keys, pattern


async def test_folders_and_files_are_private(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    store = LocalStore(root)
    await store.put("a/b", b"x")
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "a" / "b").stat().st_mode) == 0o600


async def test_its_own_folder_is_no_key_and_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(ValueError):
        await store.put(".s3kv/staging/x", b"")
    assert await all_keys(store) == []
    assert await store.list_prefixes("") == []


@pytest.mark.parametrize("taken", [".s3kv/staging", ".s3kv", ""])
async def test_folders_that_a_cleaner_takes_away_are_made_again(tmp_path: Path, taken: str) -> None:
    root = tmp_path / "root"
    store = LocalStore(root)
    await store.put("k", b"1")
    shutil.rmtree(root / taken)
    await store.put("k", b"2")
    assert await store.get("k", 1) == b"2"
    assert stat.S_IMODE((root / ".s3kv").stat().st_mode) == 0o700
    etag = (await store.head("k")).etag
    shutil.rmtree(root / ".s3kv")
    await store.put_if_match("k", b"3", etag)
    assert await store.get("k", 1) == b"3"


async def test_folders_that_cannot_be_made_again_name_the_setting(tmp_path: Path) -> None:
    root = tmp_path / "above" / "root"
    store = LocalStore(root)
    shutil.rmtree(tmp_path / "above")
    (tmp_path / "above").write_bytes(b"")
    with pytest.raises(StoreMisconfigured, match=r"store\.url \(or S3KV_STORE__URL\): folder .* cannot be used"):
        await store.put("k", b"x")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
async def test_a_folder_is_not_made_again_in_another_users(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    store = LocalStore(shared / "own" / "store")
    shutil.rmtree(shared / "own")
    (shared / "own").mkdir()
    os.chown(shared / "own", 12345, 12345)
    with pytest.raises(StoreMisconfigured, match="another user"):
        await store.put("k", b"x")
    assert list((shared / "own").iterdir()) == []


async def test_what_a_crash_left_is_neither_listed_nor_kept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    left = tmp_path / ".s3kv" / "staging" / "1-1-crashed"
    left.write_bytes(b"half")
    await store.put("k", b"x")
    assert await all_keys(store) == ["k"]
    LocalStore(tmp_path)
    assert left.exists(), "it may belong to a process that is writing"
    os.utime(left, ns=(0, left.stat().st_mtime_ns - int(STAGING_MAX_AGE_S + 1) * 10**9))
    LocalStore(tmp_path)
    assert not left.exists()


async def test_emptied_folders_go_away_and_come_back(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    async def churn(name: str) -> None:
        for _ in range(50):
            await store.put(f"x/y/{name}", b"1")
            assert await store.delete([f"x/y/{name}"]) == []

    await asyncio.gather(*(churn(str(i)) for i in range(4)))
    assert not (tmp_path / "x").exists()


async def test_links_and_pipes_are_not_objects(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"outside")
    store = LocalStore(tmp_path / "root")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "root" / "pipe")
    for key in ("link", "pipe"):
        with pytest.raises(NotFound):
            await store.get(key, 100)
        with pytest.raises(NotFound):
            await store.head(key)
    assert await all_keys(store) == []


async def test_a_full_disk_is_transient_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    await store.put("k", b"before")

    def full(descriptor: int, buffers: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(Transient, match="No space left"):
            await store.put("k", b"after")
    assert await store.get("k", 10) == b"before"
    assert list((tmp_path / ".s3kv" / "staging").iterdir()) == []


async def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, buffers: real(fd, [memoryview(buffers[0])[:7]]))
    data = pattern(1000)
    await store.put("k", [data[:100], data[100:107], data[107:]])
    assert await store.get("k", 1000) == data


@pytest.mark.parametrize(("size", "synced"), [(FSYNC_MAX_BYTES, True), (FSYNC_MAX_BYTES + 1, False)])
async def test_small_objects_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, synced: bool
) -> None:
    store = LocalStore(tmp_path)
    real, calls = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(stat.S_ISDIR(os.fstat(fd).st_mode)), real(fd))[1])
    await store.put("k", bytes(size))
    assert calls == ([False, True] if synced else []), "the file, then its folder"


async def test_a_key_cannot_be_object_and_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await store.put("a", b"x")
    with pytest.raises(StoreError):
        await store.put("a/b", b"x")
    with pytest.raises(NotFound):
        await store.get("a/b", 1)


def test_a_folder_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreMisconfigured, match=r"store.url \(or S3KV_STORE__URL\)"):
        open_store(StoreSettings(url=f"file://{tmp_path}/file/root"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_that_somebody_else_put_in_tmp_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    trap = shared / "s3kv-0" / "store"
    trap.mkdir(parents=True)
    shared.chmod(0o1777)
    os.chown(shared / "s3kv-0", 12345, 12345)
    with pytest.raises(StoreMisconfigured, match="another user"):
        LocalStore(trap)


async def test_no_permission_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)

    def denied(*_: object, **__: object) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "replace", denied)
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionDenied, match=r"store\.url"):
        await store.put("k", b"x")


RACER = """
import asyncio, sys
from pathlib import Path
from s3kv.errors import S3kvError
from s3kv.store.local import LocalStore

async def main():
    store, name = LocalStore(Path(sys.argv[1])), sys.argv[2]
    wins = 0
    for i in range(40):
        try:
            await store.put_if_absent(f"k{i}", [name.encode()] * 1000)
            wins += 1
        except S3kvError:
            pass
    data, etag = await store.get_with_etag("count", 20)
    for _ in range(25):
        while True:
            data, etag = await store.get_with_etag("count", 20)
            try:
                await store.put_if_match("count", str(int(data) + 1).encode(), etag)
                break
            except S3kvError:
                pass
    print(wins)

asyncio.run(main())
"""


async def test_processes_race_and_one_wins_each(tmp_path: Path) -> None:
    """Absent: each key has one writer, whole. Match: no increment is lost."""
    store = LocalStore(tmp_path)
    await store.put("count", b"0")
    command = [sys.executable, "-c", RACER, str(tmp_path)]
    racers = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in ("a", "b", "c")]
    wins = [int(racer.communicate(timeout=60)[0]) for racer in racers]
    assert sum(wins) == 40
    for i in range(40):
        data = await store.get(f"k{i}", 1000)
        assert data in (b"a" * 1000, b"b" * 1000, b"c" * 1000)
    assert await store.get("count", 20) == b"75"


async def test_put_if_match_waits_for_the_lock_but_not_for_ever(tmp_path: Path) -> None:
    import fcntl

    naps = 0

    async def nap(_: float) -> None:
        nonlocal naps
        naps += 1

    store = LocalStore(tmp_path, sleep=nap)
    etag = await store.put("lease", b"1")
    with (tmp_path / ".s3kv" / "lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Transient):
            await store.put_if_match("lease", b"2", etag)
    assert naps > 10
    await store.put_if_match("lease", b"2", etag)
    with pytest.raises(PreconditionFailed):
        await store.put_if_match("lease", b"3", etag)
