"""Host memory on the NUMA node of this rank's GPU, where the machine has several.

The agent makes an arena without touching it; registering it with CUDA is what faults its pages in, in this process. So
the thread that registers prefers the GPU's node meanwhile (set_mempolicy(2): the policy of a thread decides where pages
of a shared mapping without a policy of its own are taken), and then has the policy again that it had before. A thread
that is bound to nodes (numactl --membind) keeps to them. Best effort: without it copies cross the socket's link.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("s3kv.connector")

_SYSCALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""set_mempolicy and get_mempolicy."""

_PREFERRED, _BIND = 1, 2
_MODE_FLAGS = 0b111 << 13  # that a mode may carry: static and relative nodes, balancing
_MASK_BITS = 1024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_Mask = ctypes.c_ulong * (_MASK_BITS // _WORD_BITS)
_NODES = Path("/sys/devices/system/node")
_DEVICES = Path("/sys/bus/pci/devices")


def node_of(device: torch.device, *, nodes: Path = _NODES, devices: Path = _DEVICES) -> int | None:
    """The NUMA node that a GPU hangs off; None on machines of one node and where the kernel does not say."""
    if device.type != "cuda" or len(list(nodes.glob("node[0-9]*"))) < 2:
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int((devices / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if 0 <= node < _MASK_BITS else None


@contextmanager
def preferring(node: int | None) -> Iterator[None]:
    """This thread's fresh memory comes from `node` first, if it has some; None changes nothing."""
    calls = _SYSCALLS.get(platform.machine())
    if node is None or calls is None:
        yield
        return
    set_policy, get_policy = calls
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    mode, before, wanted = ctypes.c_int(), _Mask(), _Mask()
    wanted[node // _WORD_BITS] = 1 << (node % _WORD_BITS)
    known = syscall(get_policy, ctypes.byref(mode), before, _MASK_BITS, None, 0) == 0
    if known and mode.value & ~_MODE_FLAGS == _BIND:
        yield
        return
    if not known or syscall(set_policy, _PREFERRED, wanted, _MASK_BITS) != 0:
        logger.info("memory cannot be preferred on NUMA node %d (errno %d)", node, ctypes.get_errno())
        yield
        return
    try:
        yield
    finally:
        syscall(set_policy, mode.value, before, _MASK_BITS)
