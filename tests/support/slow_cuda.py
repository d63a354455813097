"""The connector on a CUDA device whose copies come late, so that a missing dependency between streams shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from s3kv.connector.cuda import CudaDevice
from s3kv.connector.device import Stream
from s3kv.connector.scheduler import SchedulerShell
from s3kv.connector.strips import Copies
from s3kv.connector.worker import WorkerShell
from s3kv.sim.interface import KvCacheConnectorScheduler, KvCacheConnectorWorker

SLEEP_CYCLES = 20_000_000
"""About 10 ms of an H200's clock: many times a pass of the small model."""


class SlowCuda(CudaDevice):
    """Every copy between slots and device waits on its own stream first, on the device."""

    def copy(self, copies: Sequence[Copies], stream: Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[attr-defined]
        super().copy(copies, stream)


class SlowWorker(WorkerShell, KvCacheConnectorWorker):
    device_factory = staticmethod(SlowCuda)


class SlowScheduler(SchedulerShell, KvCacheConnectorScheduler):
    pass
