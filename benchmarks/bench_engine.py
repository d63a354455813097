"""What the engine's own thread spends: the scheduler's and the worker's callbacks with 256 active requests.

The real connector, clients and agent process; only the runtime is the simulated one's. Pages are on the CPU, where a
snapshot copies at once, and small, because on a GPU those bytes are not the thread's work: there it launches a kernel
(benchmarks/gpu/calls.py runs the same there). Before `wait_for_save` the thread enqueues what an executor does in its
place: some small operations of torch. After it the thread sleeps for a pass of 10 ms, as an executor waits for its
device: the helper threads work then, and the caches go cold.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.agent_process import agent_process
from benchmarks.harness import Options, Report, Series, at_most
from s3kv.settings import CONFIG_VARIABLE
from s3kv.sim.bringup import make_manager
from s3kv.sim.config import ConnectorConfig, SimConfig
from s3kv.sim.demo import CONNECTOR
from s3kv.sim.install import install
from s3kv.sim.interface import RequestData, SchedulerOutput
from s3kv.sim.llm_args import make_llm_args
from s3kv.sim.llm_request import LlmRequest
from s3kv.sim.shape import ModelShape

REQUESTS, BLOCK, PROMPT = 256, 32, 64
PASS_S = 0.01
FORWARD_OPERATIONS = 20
SHAPE = ModelShape(num_layers=2, hidden=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp=8)
"""Two layer groups with pages of 1 KiB."""


def measure(options: Options) -> Report:
    report = Report(f"engine's thread, {REQUESTS} active requests, one token each an iteration; median and p99")
    nothing = Series()
    for _ in range(1000):
        _note(nothing, lambda: None)
    goals = {"build_connector_meta": 300, "wait_for_save": 100, "get_finished": 20}
    idle, busy = both("cpu", options.rounds(16) * BLOCK)
    _row(report, "build_connector_meta, no block completing", idle["build_connector_meta"], nothing, 150)
    for name, bound in goals.items():
        what = f"{name}, 8 blocks completing"
        _row(report, what, busy[name], nothing, bound)
    _row(report, "wait_for_save, no block completing", idle["wait_for_save"], nothing, None)
    _row(report, "bind_connector_meta and start_load_kv, 8 completing", busy["bind"], nothing, None)
    for what, found in (("build_connector_meta, none", idle), ("build_connector_meta, 8", busy)):
        report.row(f"{what}: CPU of the thread", found["build_connector_meta"].cpu_s * 1e6, "µs")
    report.row("wait_for_save, 8: CPU of the thread", busy["wait_for_save"].cpu_s * 1e6, "µs")
    report.data = {
        f"{name} {kind}": {"wall_us": each.wall_s * 1e6, "cpu_us": each.cpu_s * 1e6}
        for kind, found in (("idle", idle), ("busy", busy))
        for name, each in found.items()
    }
    return report


def both(device: str, steps: int) -> tuple[dict[str, Series], dict[str, Series]]:
    """Each callback's series over `steps` iterations, none completing a block and 8 doing so. On "cuda" too."""
    with engine_halves(torch.device(device)) as (scheduler, worker):
        idle = _Batch(scheduler, worker, device, first_id=1, staggered=False).run(steps)
        busy = _Batch(scheduler, worker, device, first_id=10_000, staggered=True).run(steps)
    return idle, busy


def _row(report: Report, what: str, of: Series, nothing: Series, bound: float | None) -> None:
    report.row(
        what, of.wall_s * 1e6, "µs", peer="an empty call", peer_figure=nothing.wall_s * 1e6,
        goal=None if bound is None else at_most(bound, "figure"),
    )  # fmt: skip
    report.row("    its p99", of.percentile(0.99) * 1e6, "µs")


def _note(series: Series, work: Any) -> Any:
    cpu, wall = time.thread_time(), time.perf_counter()
    result = work()
    series.wall.append(time.perf_counter() - wall)
    series.cpu.append(time.thread_time() - cpu)
    return result


@contextmanager
def engine_halves(device: torch.device) -> Iterator[tuple[Any, Any]]:
    """A scheduler and a worker of one rank whose pages are on `device`, with an agent."""
    sections: dict[str, dict[str, Any]] = {
        "tier": {"capacity_bytes": 1 << 29},
        "upload": {"enabled": False},
        "identity": {"fingerprint": "benchmark"},
    }
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="s3kv-bench-") as name,
        agent_process(Path(name), **sections),
        install(),
    ):
        os.environ[CONFIG_VARIABLE] = str(Path(name) / "s3kv.yaml")
        from s3kv.connector import S3KVScheduler, S3KVWorker

        config = SimConfig(model=SHAPE, tokens_per_block=BLOCK, num_pages=4096, max_batch_size=REQUESTS)
        args = make_llm_args(config, ConnectorConfig(**CONNECTOR), 0)
        worker, scheduler = S3KVWorker(args), S3KVScheduler(args)
        manager = make_manager(config, device)  # owns the pages, so it must outlive the worker
        worker.register_kv_cache_layout(manager.layout())
        scheduler.wait_for_initialization()
        try:
            yield scheduler, worker
        finally:
            scheduler.shutdown()
            worker.shutdown()
            del manager
            del os.environ[CONFIG_VARIABLE]


class _Batch:
    """256 requests that have been prefilled and decode one token an iteration.

    staggered: their lengths differ so that 8 of them complete a block in every iteration; else all do in every 32nd,
    which is left out.
    """

    def __init__(self, scheduler: Any, worker: Any, device: str, *, first_id: int, staggered: bool) -> None:
        self._scheduler, self._worker = scheduler, worker
        self._stream = torch.cuda.current_stream() if device == "cuda" else None
        self._state = torch.zeros(64, device=device)
        self._staggered = staggered
        rng = random.Random(first_id)
        lengths = [PROMPT + (number % BLOCK if staggered else 0) for number in range(REQUESTS)]
        self._requests = [
            LlmRequest(first_id + i, [rng.randrange(256) for _ in range(length)], 4096, tokens_per_block=BLOCK)
            for i, length in enumerate(lengths)
        ]
        self._positions = lengths
        self._page = 0

    def run(self, steps: int) -> dict[str, Series]:
        names = ("build_connector_meta", "bind", "wait_for_save", "get_finished")
        series = {name: Series() for name in names}
        self._iterate(SchedulerOutput([self._first(i) for i in range(REQUESTS)], []), {n: Series() for n in names})
        for step in range(steps):
            output = SchedulerOutput([], [self._later(i) for i in range(REQUESTS)])
            all_complete = not self._staggered and any(p % BLOCK == 0 for p in self._positions)
            self._iterate(output, {name: Series() for name in names} if all_complete or step < 2 else series)
            if all_complete:
                assert self._worker.transfers.drain(30)
        for request in self._requests:
            self._scheduler.request_finished_by_layer_group(request, [[], []])
        return series

    def _iterate(self, output: SchedulerOutput, series: dict[str, Series]) -> None:
        scheduler, worker = self._scheduler, self._worker
        meta = _note(series["build_connector_meta"], lambda: scheduler.build_connector_meta(output))
        _note(series["bind"], lambda: (worker.bind_connector_meta(meta), worker.start_load_kv(self._stream)))
        for _ in range(FORWARD_OPERATIONS):
            self._state = self._state * 0.5 + 1
        _note(series["wait_for_save"], lambda: worker.wait_for_save(self._stream))
        time.sleep(PASS_S)
        _note(series["get_finished"], lambda: worker.get_finished([], []))

    def _pages(self, count: int) -> list[int]:
        self._page = (self._page + count) % 4000
        return list(range(self._page, self._page + count))

    def _first(self, index: int) -> RequestData:
        request, length = self._requests[index], self._positions[index]
        offered, _ = self._scheduler.get_num_new_matched_tokens(request, 0)
        assert offered == 0
        pages = self._pages(-(-length // BLOCK))
        return RequestData(
            request.request_id, request.get_tokens(0), [], 0, length, new_block_ids_by_layer_group=[pages, pages]
        )

    def _later(self, index: int) -> RequestData:
        position = self._positions[index]
        self._positions[index] = position + 1
        pages = self._pages(1) if position % BLOCK == 0 else []
        return RequestData(
            self._requests[index].request_id, [position % 251], [], position, 1,
            new_block_ids_by_layer_group=[pages, pages],
        )  # fmt: skip
