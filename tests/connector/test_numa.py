from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
