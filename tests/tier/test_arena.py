"""Shared memory between real processes, and what a lying agent can do to an engine: nothing."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from s3kv.errors import ConfigError, ProtocolError
from s3kv.tier import Arena, arena, memory

PAGE = arena.PAGE_BYTES


@pytest.fixture
def made() -> Iterator[Arena]:
    made = Arena.create(8, 2 * PAGE)
    yield made
    made.close()


def engine(connection: socket.socket, slots: int, slot_bytes: int) -> None:
    """The other process: attaches, adds one to every byte of slot 3, waits, and says what it then reads in slot 5."""
    with connection:
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        attached = Arena.attach(fds[0], slots, slot_bytes)
        os.close(fds[0])
        np.frombuffer(attached.view(3), np.uint8)[:] += 1
        connection.sendall(b"written")
        connection.recv(1)
        connection.sendall(bytes(attached.view(5)[:4]))


def test_two_processes_see_each_others_bytes(made: Arena) -> None:
    np.frombuffer(made.view(3), np.uint8)[:] = 41
    ours, theirs = socket.socketpair()
    child = multiprocessing.get_context("spawn").Process(target=engine, args=(theirs, 8, 2 * PAGE))
    with ours:
        child.start()
        theirs.close()
        socket.send_fds(ours, [b"x"], [made.fd])
        assert ours.recv(7) == b"written"
        assert bytes(made.view(3)) == bytes([42]) * 2 * PAGE
        assert bytes(made.view(2)) == bytes(made.view(4)) == bytes(2 * PAGE)
        made.view(5)[:4] = b"five"
        ours.sendall(b"x")
        assert ours.recv(4) == b"five"
        child.join(30)
    assert child.exitcode == 0


def test_the_bytes_outlive_the_agents_mapping(made: Arena) -> None:
    attached = Arena.attach(made.fd, 8, 2 * PAGE)
    made.view(1)[:3] = b"abc"
    made.close()
    assert bytes(attached.view(1)[:3]) == b"abc"
    assert attached.fd == -1
    attached.close()


@pytest.mark.parametrize("size", [0, 8 * 2 * PAGE - 1, 9 * 2 * PAGE])
def test_the_file_can_neither_shrink_nor_grow(made: Arena, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(made.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(made.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_file_that_may_still_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("liar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 8 * PAGE)
        with pytest.raises(ProtocolError, match="not sealed"):
            Arena.attach(fd, 8, PAGE)
    finally:
        os.close(fd)


def test_a_file_smaller_than_announced_is_not_mapped(made: Arena) -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        Arena.attach(made.fd, 9, 2 * PAGE)


def test_what_is_no_memfd_is_not_mapped() -> None:
    with tempfile.TemporaryFile() as file, pytest.raises(ProtocolError):
        file.truncate(8 * PAGE)
        Arena.attach(file.fileno(), 8, PAGE)
    with pytest.raises(ProtocolError):
        Arena.attach(999_999, 8, PAGE)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, PAGE), (-1, PAGE), (1, 0), (1, PAGE - 1), (1 << 40, PAGE)])
def test_sizes_that_make_no_sense(made: Arena, slots: int, slot_bytes: int) -> None:
    with pytest.raises(ProtocolError):
        Arena.attach(made.fd, slots, slot_bytes)
    with pytest.raises(ValueError, match="no sense"):
        Arena.create(slots, slot_bytes)


def resident_bytes(made: Arena) -> int:
    return os.fstat(made.fd).st_blocks * 512


def test_memory_is_taken_when_touched_and_returned_when_punched(made: Arena) -> None:
    assert resident_bytes(made) == 0
    made.view(2)[:] = bytes([7]) * 2 * PAGE
    made.view(3)[:] = bytes([8]) * 2 * PAGE
    assert resident_bytes(made) == 4 * PAGE
    assert made.punch(2)
    assert resident_bytes(made) == 2 * PAGE
    assert bytes(made.view(2)) == bytes(2 * PAGE)
    assert bytes(made.view(3)) == bytes([8]) * 2 * PAGE


def test_views_are_the_slots_of_one_writable_buffer(made: Arena) -> None:
    made.view(7)[0] = 9
    assert made.buffer[7 * 2 * PAGE] == 9
    assert len(made.buffer) == made.nbytes == 8 * 2 * PAGE
    assert np.frombuffer(made.buffer, np.uint8).ctypes.data == made.address
    for slot in (-1, 8):
        with pytest.raises(IndexError):
            made.view(slot)
        with pytest.raises(IndexError):
            made.punch(slot)


def test_use_after_close_is_an_error_and_views_stay_alive(made: Arena) -> None:
    view = made.view(1)
    array = np.frombuffer(made.buffer, np.uint8)
    made.close()
    made.close()
    view[:2] = b"ok"
    assert bytes(array[2 * PAGE : 2 * PAGE + 2]) == b"ok"
    assert made.closed and made.fd == -1
    assert not made.punch(0)
    with pytest.raises(ValueError, match="closed"):
        made.view(0)
    with pytest.raises(ValueError, match="closed"):
        made.address  # noqa: B018


def test_close_without_views_unmaps_at_once() -> None:
    made = Arena.create(1, PAGE, name="s3kv-close-test")
    maps = Path("/proc/self/maps")
    assert "s3kv-close-test" in maps.read_text()
    assert made.address
    made.close()
    assert "s3kv-close-test" not in maps.read_text()


def test_a_failed_creation_leaves_no_file_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "out of memory")

    before = sorted(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match=r"tier\.capacity_bytes"):
        Arena.create(1, PAGE)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_without_huge_pages_there_are_ordinary_ones_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = os.memfd_create

    def no_huge_pages(name: str, flags: int) -> int:
        if flags & os.MFD_HUGETLB:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", no_huge_pages)
    made = Arena.create(2, PAGE, hugepages=True)
    assert not made.hugepages
    made.view(1)[:] = bytes(PAGE)
    made.close()
    assert "tier.hugepages" in caplog.text


def test_an_arena_larger_than_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    available = memory.available_bytes()
    assert available is not None
    with pytest.raises(ConfigError, match=r"tier\.capacity_bytes"):
        Arena.create(available // PAGE + 1, PAGE)
    monkeypatch.setattr(arena, "check_available", lambda nbytes: None)
    Arena.create(available // PAGE + 1, PAGE).close()


def fake_machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       2000 kB\nMemAvailable:   1000 kB\n"}
V2 = {
    "proc/self/cgroup": "0::/pod/box\n",
    "sys/fs/cgroup/pod/memory.max": "700000\n",
    "sys/fs/cgroup/pod/memory.current": "300000\n",
    "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_file 100000\n",
    "sys/fs/cgroup/pod/box/memory.max": "max\n",
    "sys/fs/cgroup/pod/box/memory.current": "5\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/host/path\n1:cpu:/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "50000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "20000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 1_024_000),
        (MEMINFO | V2, 500_000),
        (MEMINFO | V1, 30_000),
        (V1 | {"sys/fs/cgroup/memory/memory.usage_in_bytes": "60000\n"}, 0),
        ({"proc/meminfo": "MemAvailable:\n"}, None),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    root = fake_machine(tmp_path, files)
    assert memory.available_bytes(root) == expected
    if expected is None:
        memory.check_available(1 << 60, root)
    else:
        memory.check_available(int(expected * 0.9), root)
        with pytest.raises(ConfigError, match=r"tier\.capacity_bytes"):
            memory.check_available(int(expected * 0.96) + 1, root)
