"""What a failed call of CUDA's leaves behind, on a runtime that remembers its last error as CUDA's does."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from s3kv.connector import cuda


class Runtime:
    """`answer`: what registering gives."""

    def __init__(self, answer: int) -> None:
        self.answer, self.last_error, self.asked = answer, 0, 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.last_error = self.answer or self.last_error
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        return self.cudaHostRegister(address, 0, 0)

    def cudaGetLastError(self) -> int:
        error, self.last_error, self.asked = self.last_error, 0, self.asked + 1
        return error

    def launch(self, *_: object, **__: object) -> None:
        """A kernel, and torch's check of its launch."""
        if error := self.cudaGetLastError():
            raise RuntimeError(f"CUDA error {error}")


@pytest.fixture(params=["exported", "hidden", "no library"])
def reach(request: pytest.FixtureRequest) -> str:
    """How the runtime that torch calls can be reached."""
    return str(request.param)


def device_on(runtime: Runtime, reach: str, patch: pytest.MonkeyPatch) -> cuda.CudaDevice:
    def library(path: str) -> Any:
        assert path.endswith("libc10_cuda.so")
        if reach == "no library":
            raise OSError("no such file")
        return runtime if reach == "exported" else object()

    patch.setattr(cuda, "_cudart", lambda: runtime)
    patch.setattr(cuda, "node_of", lambda device: None)
    patch.setattr(ctypes, "CDLL", library)
    patch.setattr(torch, "ones", runtime.launch)
    return cuda.CudaDevice(torch.device("cuda", 0))


def test_a_failed_registration_is_nobody_elses_error(reach: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(answer=1)
    device = device_on(runtime, reach, monkeypatch)
    assert "CUDA error 1" in (device.pin(4096, 4096) or "")
    runtime.launch()
    device.unpin(4096)
    runtime.launch()


def test_registering_leaves_other_peoples_errors_alone(reach: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(answer=0)
    device = device_on(runtime, reach, monkeypatch)
    runtime.last_error = 7
    assert device.pin(4096, 4096) is None
    device.unpin(4096)
    assert (runtime.last_error, runtime.asked) == (7, 0)
