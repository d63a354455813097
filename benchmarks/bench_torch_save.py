"""The demo's KV, saved, and loaded by a new engine: s3kv against one `torch.save` file a block, synchronous.

The peer does what TensorRT-LLM's example of a connector does: in `wait_for_save` it writes each completed block to a
file of its own, and in `start_load_kv` it reads them back. Both run under the same simulated runtime on the same
prompts; counted is what the executor's own thread spends inside the connector's callbacks.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.agent_process import agent_process
from benchmarks.harness import Clock, Options, Report, Series, at_least, ratio
from s3kv.client.connection import Connection
from s3kv.client.protocol import Drain, Drained
from s3kv.settings import CONFIG_VARIABLE, Settings
from s3kv.sim.config import ConnectorConfig, SimConfig, SimRequest
from s3kv.sim.demo import CONNECTOR, NEW_TOKENS, TOKENS_PER_BLOCK, read_prompts
from s3kv.sim.engine import Engine
from s3kv.sim.install import install
from s3kv.sim.shape import ModelShape

TOY = ConnectorConfig("support.toy_connector", "ToyScheduler", "ToyWorker")
CALLBACKS = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "update_state_after_alloc_by_layer_group",
    "build_connector_meta", "request_finished", "request_finished_by_layer_group", "bind_connector_meta",
    "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_finished",
)  # fmt: skip
# The demo's own model keeps 128 bytes a token and layer; a served one keeps 4 KiB (8 KV heads of 128 channels).
WIDE = ModelShape(num_layers=4, num_kv_heads=4, head_dim=128)


PHASES = ("save", "load", "load, agent restarted")


@dataclass
class Spent:
    """Seconds of the executor's thread."""

    wall: float = 0.0
    cpu: float = 0.0


def measure(options: Options) -> Report:
    report = Report("save, restart, load: s3kv against torch.save a block; time of the engine's thread in callbacks")
    prompts = [each for each in read_prompts(ROOT / "examples" / "prompts.jsonl") if each.repeated]
    tokens = [each.tokens for each in prompts[: 2 if options.quick else 4]]
    for name, shape in (("the demo's KV", ModelShape()), ("4 KiB a token and layer", WIDE)):
        _compare(report, name, shape, tokens, options.rounds(5))
    report.note(
        "Loads of s3kv after a restart of the agent wait for the store within the budget of the match: "
        "wall time, and no CPU."
    )
    return report


def _compare(report: Report, name: str, shape: ModelShape, prompts: list[tuple[int, ...]], rounds: int) -> None:
    ours = {phase: Series() for phase in PHASES}
    theirs = {phase: Series() for phase in PHASES}
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="s3kv-bench-") as folder, install():
            contestants = [(ours, _ours), (theirs, _theirs)]
            for series, run in contestants if number % 2 else contestants[::-1]:
                for phase, spent in run(Path(folder), shape, prompts).items():
                    series[phase].wall.append(spent.wall)
                    series[phase].cpu.append(spent.cpu)
    blocks = sum(len(each) // TOKENS_PER_BLOCK for each in prompts)
    clocks: tuple[Clock, Clock] = ("wall", "cpu")
    for clock in clocks:
        for phase in PHASES:
            peer = theirs[phase.partition(",")[0]]
            restarted = "restarted" in phase
            _row(report, f"{name}, {blocks} blocks: {phase}", ours[phase], peer, clock, judged=not restarted)


def _row(report: Report, what: str, of: Series, to: Series, clock: Clock, *, judged: bool) -> None:
    """The ratio is how many times faster s3kv is."""
    figures = [statistics.median(getattr(each, clock)) * 1e3 for each in (of, to)]
    report.row(
        what, figures[0], "ms" if clock == "wall" else "ms CPU", peer="torch.save, torch.load", peer_figure=figures[1],
        ratio=ratio(to, of, clock), goal=at_least(10) if judged else None,
    )  # fmt: skip


def _config(shape: ModelShape, prompts: list[tuple[int, ...]]) -> SimConfig:
    pages = 2 * -(-(max(map(len, prompts)) + NEW_TOKENS) // TOKENS_PER_BLOCK)
    return SimConfig(model=shape, tokens_per_block=TOKENS_PER_BLOCK, num_pages=pages, kv_dtype="bfloat16")


def _run(connector: ConnectorConfig, shape: ModelShape, prompts: list[tuple[int, ...]]) -> tuple[Spent, int]:
    """(time in callbacks, tokens loaded) of one engine's life; its device begins empty."""
    requests = [SimRequest(i, tokens, NEW_TOKENS) for i, tokens in enumerate(prompts)]
    with timed_callbacks(connector) as spent, Engine(_config(shape, prompts), connector) as engine:
        results = engine.generate(requests, sequential=True, empty_device=True)
    return spent, sum(each.loaded_tokens for each in results)


@contextmanager
def timed_callbacks(connector: ConnectorConfig) -> Iterator[Spent]:
    """Adds up the time inside the callbacks of the two classes."""
    module = importlib.import_module(connector.connector_module)
    spent = Spent()
    classes = [getattr(module, connector.connector_scheduler_class), getattr(module, connector.connector_worker_class)]
    before = [
        (kind, name, kind.__dict__.get(name), getattr(kind, name, None)) for kind in classes for name in CALLBACKS
    ]
    for kind, name, _, method in before:
        if method is not None and method.__module__ != "s3kv.sim.interface":
            setattr(kind, name, _timed(method, spent))
    try:
        yield spent
    finally:
        for kind, name, own, method in before:
            if own is not None:
                setattr(kind, name, own)
            elif method is not None and name in kind.__dict__:
                delattr(kind, name)


def _timed(method: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        cpu, wall = time.thread_time(), time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent.wall += time.perf_counter() - wall
            spent.cpu += time.thread_time() - cpu

    timed.__module__ = method.__module__
    return timed


def _ours(folder: Path, shape: ModelShape, prompts: list[tuple[int, ...]]) -> dict[str, Spent]:
    sections: dict[str, dict[str, Any]] = {
        "tier": {"capacity_bytes": 1 << 28},
        "identity": {"fingerprint": "benchmark"},
        "catalog": {"map_bytes": 1 << 28},
    }
    found = {}
    connector = ConnectorConfig(**CONNECTOR)
    for phase in ("save", "load, agent restarted"):
        with agent_process(folder, **sections) as (settings, _):
            os.environ[CONFIG_VARIABLE] = str(folder / "s3kv.yaml")
            try:
                found[phase], loaded = _run(connector, shape, prompts)
                assert loaded or phase == "save"
                if phase == "save":
                    _flush(settings)
                    found["load"], loaded = _run(connector, shape, prompts)
                    assert loaded
            finally:
                del os.environ[CONFIG_VARIABLE]
    return found


def _flush(settings: Settings) -> None:
    control = Connection.open(settings.agent.socket, "cli", timeout_s=10)
    control.call(Drain(control.next_id(), 60), Drained, timeout_s=70)
    control.close()


def _theirs(folder: Path, shape: ModelShape, prompts: list[tuple[int, ...]]) -> dict[str, Spent]:
    files = folder / "files"
    files.mkdir()
    os.environ["TOY"] = json.dumps({"store": str(files)})
    sys.modules.pop(TOY.connector_module, None)
    try:
        saved, _ = _run(TOY, shape, prompts)
        loaded, tokens = _run(TOY, shape, prompts)
        assert tokens
        return {"save": saved, "load": loaded}
    finally:
        del os.environ["TOY"]
