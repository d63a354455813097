"""Host memory on the NUMA node of this rank's GPU, where the machine has several.

The agent makes an arena without touching it; registering it with CUDA is what faults its pages in, in this process. So
the thread that registers prefers the GPU's node meanwhile (set_mempolicy(2): the policy of a thread decides where pages
of a shared mapping without a policy of its own are taken). Best effort: without it copies cross the socket's link.
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

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_DEFAULT, _PREFERRED = 0, 1
_MASK_BITS = 1024
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
    number = _SET_MEMPOLICY.get(platform.machine())
    if node is None or number is None:
        yield
        return
    mask = (ctypes.c_ulong * (_MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    word = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // word] = 1 << (node % word)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _PREFERRED, mask, _MASK_BITS) != 0:
        logger.info("memory cannot be preferred on NUMA node %d (errno %d)", node, ctypes.get_errno())
        yield
        return
    try:
        yield
    finally:
        libc.syscall(number, _DEFAULT, None, 0)
