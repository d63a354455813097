from __future__ import annotations

import ctypes
import platform
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from s3kv.connector import numa
from s3kv.connector.numa import node_of, preferring


def machine(folder: Path, nodes: int) -> dict[str, Path]:
    for node in range(nodes):
        (folder / "nodes" / f"node{node}").mkdir(parents=True)
    gpu = folder / "devices" / "0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    return {"nodes": folder / "nodes", "devices": folder / "devices"}


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    return found


def test_the_gpu_s_node_counts_only_where_there_are_several(tmp_path: Path, properties: SimpleNamespace) -> None:
    gpu = torch.device("cuda", 0)
    assert node_of(gpu, **machine(tmp_path / "two", 2)) == 1
    assert node_of(gpu, **machine(tmp_path / "one", 1)) is None
    assert node_of(torch.device("cpu"), **machine(tmp_path / "cpu", 2)) is None
    properties.pci_bus_id = 0x5E
    assert node_of(gpu, **machine(tmp_path / "unknown", 2)) is None


@pytest.mark.parametrize("node", [None, 0, 1000])
def test_preferring_a_node_never_fails(node: int | None) -> None:
    with preferring(node):
        assert sum(bytearray(1 << 20)) == 0


DEFAULT, PREFERRED, BIND, INTERLEAVE, LOCAL = range(5)
Policy = tuple[int, int]
"""Mode, and the first 64 nodes as bits."""


def policy() -> Policy | None:
    """This thread's; None where the kernel, or a sandbox, does not say."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    number = numa._SYSCALLS[platform.machine()][1]
    answer = ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, 1024, None, 0)
    return None if answer else (mode.value, mask[0])


def set_policy(wanted: Policy) -> bool:
    mask = (ctypes.c_ulong * 16)(wanted[1])
    number = numa._SYSCALLS[platform.machine()][0]
    return ctypes.CDLL(None).syscall(number, wanted[0], mask, 1024) == 0


@pytest.mark.skipif(platform.machine() not in numa._SYSCALLS, reason="numbers of the calls are not known")
@pytest.mark.parametrize("before", [(DEFAULT, 0), (PREFERRED, 1), (BIND, 1), (INTERLEAVE, 1), (LOCAL, 0)])
def test_a_thread_has_its_own_policy_again(before: Policy) -> None:
    seen: list[Policy | None] = []

    def work() -> None:  # in a thread, whose policy goes with it
        if policy() is None or not set_policy(before):
            return
        with preferring(0):
            seen.append(policy())
        seen.append(policy())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not seen:
        pytest.skip("memory policies cannot be set here")
    assert seen == [before if before[0] == BIND else (PREFERRED, 1), before]


def test_a_policy_that_cannot_be_read_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Libc:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def syscall(self, number: int, *_: object) -> int:
            calls.append(number)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", Libc)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with preferring(0):
        pass
    assert calls == [239]
