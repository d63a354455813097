"""A small serving loop around the 8B-shaped model that calls the connector as the runtime does (V1 pool)."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.model import Model
from s3kv.settings import CONFIG_VARIABLE, Settings
from s3kv.sim.comm import Solo
from s3kv.sim.config import ConnectorConfig, SimConfig
from s3kv.sim.demo import CONNECTOR, write_settings
from s3kv.sim.driver import ConnectorDriver
from s3kv.sim.install import installed, set_rank
from s3kv.sim.llm_args import make_llm_args
from s3kv.sim.llm_request import LlmRequest, LlmRequestState

CHUNK = 8192


@dataclass
class Calls:
    """Seconds on the executor's thread, by call."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def timed(self, name: str) -> Any:
        begin = time.perf_counter()
        yield
        self.seconds[name].append(time.perf_counter() - begin)

    def medians_us(self) -> dict[str, float]:
        return {name: 1e6 * statistics.median(values) for name, values in self.seconds.items()}


class Pages:
    """Which pages each request has: what the driver asks a cache manager for."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[int, list[int]] = {}
        self._last_id = 0

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def grow(self, request_id: int, blocks: int) -> list[int]:
        held = self._held.setdefault(request_id, [])
        while len(held) < blocks:
            held.append(self._free.pop())
        return held

    def drop(self, request_id: int) -> None:
        self._free.extend(reversed(self._held.pop(request_id)))

    def pages(self, request_id: int) -> list[list[int]]:
        return [self._held[request_id]]

    def block_hashes(self, request: LlmRequest) -> list[int]:
        return []


def attach(model: Model, settings: Settings, folder: Path) -> ConnectorDriver:
    """The connector's two halves over the model's pool, with their settings in `folder`."""
    write_settings(settings, folder / "s3kv.yaml")
    os.environ[CONFIG_VARIABLE] = str(folder / "s3kv.yaml")
    assert installed() is not None
    set_rank(0, 1)
    config = SimConfig(tokens_per_block=model.shape.block, max_num_tokens=CHUNK, overlap=True)
    args = make_llm_args(config, ConnectorConfig(**CONNECTOR), 0)
    import s3kv.connector as connector

    worker, scheduler = connector.S3KVWorker(args), connector.S3KVScheduler(args)
    worker.register_kv_caches(model.pool)
    scheduler.wait_for_initialization()
    return ConnectorDriver(worker, scheduler, Solo(), attention_dp=False, grouped=False, early=False)


def attach_idle() -> ConnectorDriver:
    """The same runtime with a connector that does nothing: what the runtime's own reports cost is on both sides."""
    return ConnectorDriver(Idle(), Idle(), Solo(), attention_dp=False, grouped=False, early=False)


class Idle:
    """Both halves of a connector that answers with nothing."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 0, False

    def request_finished(self, request: Any, pages: Any) -> bool:
        return False

    def get_finished(self, ended: Any, started: Any) -> tuple[list[int], list[int]]:
        return [], []

    def _nothing(self, *_: Any) -> None:
        return

    update_state_after_alloc = build_connector_meta = bind_connector_meta = _nothing
    start_load_kv = wait_for_save = shutdown = _nothing


class Serving:
    def __init__(self, model: Model, driver: ConnectorDriver | None, pages: Pages) -> None:
        self.model, self.driver, self.pages = model, driver, pages
        self.calls = Calls()
        self.stream = torch.cuda.current_stream()
        if driver is not None:
            self._time_metadata(driver)

    def request(self, tokens: list[int]) -> LlmRequest:
        return LlmRequest(self.pages.next_id(), tokens, 1, tokens_per_block=self.model.shape.block)

    def first_token(self, tokens: list[int]) -> tuple[float, int]:
        """(seconds to the first token, tokens loaded) of one prompt, its pages given back at the end."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        request = self.request(tokens)
        with self.calls.timed("match"):
            loaded, is_async = self.driver.query(request, 0) if self.driver is not None else (0, False)
        assert not is_async
        held = self.pages.grow(request.request_id, -(-len(tokens) // self.model.shape.block))
        table = torch.tensor(held, device="cuda")
        if self.driver is not None:
            self.driver.honour(request, loaded, False)
            self.driver.allocated(request, [held])
        request.context_current_position = loaded
        fresh = torch.tensor(tokens, device="cuda")
        token, previous = torch.zeros(()), None
        while request.context_remaining_length:
            request.context_chunk_size = min(CHUNK, request.context_remaining_length)
            start = request.context_current_position
            end = start + request.context_chunk_size
            self.pass_over([request], lambda s=start, e=end: self.model.prefill(fresh[s:e], s, table))  # type: ignore[misc]
            token = self.result
            if previous is not None:
                previous.synchronize()  # as the overlap scheduler does: at most one pass ahead of the device
            previous = torch.cuda.Event()
            previous.record()
            request.context_current_position = end
        token.item()
        seconds = time.perf_counter() - begin
        self.finish(request)
        return seconds, loaded

    def _time_metadata(self, driver: ConnectorDriver) -> None:
        """Time the connector's own call: the simulated runtime's reports around it are not the connector's."""
        build = driver.scheduler.build_connector_meta  # type: ignore[union-attr]

        def timed(output: Any) -> Any:
            with self.calls.timed("build_connector_meta"):
                return build(output)

        driver.scheduler.build_connector_meta = timed  # type: ignore[union-attr]

    def pass_over(self, requests: list[LlmRequest], forward: Any, generation: bool = False) -> None:
        """One iteration: metadata, loads, forward, save, finished."""
        driver = self.driver
        if driver is not None:
            driver.handle_metadata([] if generation else requests, requests if generation else [], self.pages)
            with self.calls.timed("start_load_kv"):
                driver.start_load(self.stream)
        self.result = forward()
        if driver is not None:
            with self.calls.timed("wait_for_save"):
                driver.wait_for_save(self.stream)
            with self.calls.timed("get_finished"):
                driver.get_finished()

    def finish(self, request: LlmRequest) -> None:
        if self.driver is not None:
            request.state = LlmRequestState.GENERATION_COMPLETE
            held = self.driver.request_finished(request, self.pages.pages(request.request_id))
            assert not held
        self.pages.drop(request.request_id)
