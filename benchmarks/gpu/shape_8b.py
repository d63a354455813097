"""Passes, decode and time to first token at an 8B model's shape, with s3kv against without in the same run."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.model import Model, Shape
from benchmarks.gpu.serving import CHUNK, Pages, Serving, attach, attach_idle
from s3kv.client.connection import Connection
from s3kv.client.protocol import Done, Drain, Drained, Forget, Report, Status
from s3kv.errors import AgentUnavailable
from s3kv.format.chunk import encode_page
from s3kv.format.codecs import Codec
from s3kv.settings import Settings
from s3kv.sim.install import install
from s3kv.sim.llm_request import LlmRequestState

GIB = 1 << 30
PASS_PAIRS = 8
DECODE_SEQUENCES, DECODE_CONTEXT, DECODE_STEPS, DECODE_SEGMENTS = 64, 1024, 64, 8
PROMPTS = (4096, 32768, 131072)
NETWORKS = ((0.0, 0.0), (0.02, 0.0), (0.02, 10e9), (0.02, 5e9), (0.02, 1e9))


@contextmanager
def bucket_folder() -> Iterator[Path]:
    """In memory, which is as fast as a store can be; gone at the end."""
    with tempfile.TemporaryDirectory(prefix="s3kv-bench-", dir="/dev/shm") as name:
        yield Path(name)


def settings_for(
    folder: Path, bucket: Path, capacity: int, wait_ms_per_1k_tokens: float = 1000.0, wait_cap_ms: float = 60_000.0
) -> Settings:
    """The waits here, unless others are given, are as good as unlimited: how long loading takes is what is measured."""
    values: dict[str, Any] = {
        "agent": {"socket": folder / "agent.sock", "autostart": False},
        "store": {"url": f"file://{bucket}"},
        "tier": {"capacity_bytes": capacity, "dirty_max_fraction": 1.0},
        "save": {"ring_max_bytes": 2 * GIB},
        "load": {
            "wait_ms_per_1k_tokens": wait_ms_per_1k_tokens,
            "wait_cap_ms": wait_cap_ms,
            "max_pinned_fraction": 1.0,
        },
        "upload": {"codec": "raw", "threads": 8, "inflight_bytes": GIB},
        "fetch": {"inflight_bytes": 2 * GIB, "concurrency": 32, "deadline_s": 120.0},
        "identity": {"fingerprint": "random weights of an 8B shape"},
        "catalog": {"index_dir": folder / "index"},
    }
    return Settings.model_validate(values)


@contextmanager
def agent(settings: Settings, folder: Path, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> Iterator[Connection]:
    from s3kv.sim.demo import write_settings

    write_settings(settings, folder / "s3kv.yaml")
    environment = {**os.environ, "S3KV_CONFIG": str(folder / "s3kv.yaml")}
    command = [sys.executable, "-m", "benchmarks.gpu.shaped_agent", str(latency_s), str(bytes_per_s)]
    process = subprocess.Popen(command, env=environment)
    try:
        for _ in range(600):
            try:
                connection = Connection.open(settings.agent.socket, "cli", timeout_s=1.0)
                break
            except AgentUnavailable:
                time.sleep(0.05)
        yield connection
    finally:
        process.terminate()
        process.wait(60)


def status(connection: Connection) -> dict[str, Any]:
    reply = connection.call(Status(connection.next_id()), Report, timeout_s=30)
    result: dict[str, Any] = json.loads(reply.text)
    return result


def settle(connection: Connection, serving: Serving) -> None:
    """Until what was saved is committed and stored."""
    assert serving.driver is not None
    serving.driver.worker.transfers.drain(60)
    connection.call(Drain(connection.next_id(), 120.0), Drained, timeout_s=130)


def forget(connection: Connection) -> None:
    connection.call(Forget(connection.next_id(), ""), Done, timeout_s=60)


def prompt(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


def passes(model: Model, serving: Serving, bare: Serving, connection: Connection, rng: random.Random) -> dict[str, Any]:
    """8,192-token passes with every block saved against without, alternating; time on the device by events."""
    times: dict[str, list[float]] = {"with": [], "without": []}
    pair = [("with", serving), ("without", bare)]
    for index in range(PASS_PAIRS + 1):
        for name, each in pair if index % 2 else pair[::-1]:
            tokens = prompt(rng, CHUNK, model.shape.vocab)
            request = each.request(tokens)
            held = each.pages.grow(request.request_id, CHUNK // model.shape.block)
            table, fresh = torch.tensor(held, device="cuda"), torch.tensor(tokens, device="cuda")
            request.context_chunk_size = CHUNK
            if each.driver is not None:
                each.driver.query(request, 0)
                each.driver.honour(request, 0, False)
                each.driver.allocated(request, [held])
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            each.pass_over([request], lambda t=table, f=fresh: model.prefill(f, 0, t))  # type: ignore[misc]
            end.record()
            end.synchronize()
            if index:
                times[name].append(begin.elapsed_time(end))
            each.finish(request)
            settle(connection, serving)  # what one side copies and uploads must not run beside the other's pass
        forget(connection)
    ratios = [w / o for w, o in zip(times["with"], times["without"], strict=True)]
    return {
        "with_ms": statistics.median(times["with"]),
        "without_ms": statistics.median(times["without"]),
        "ratio": statistics.median(ratios),
        "saved_bytes_a_pass": CHUNK // model.shape.block * model.shape.block_bytes,
        "troubles": serving.driver.worker.troubles.as_dict() if serving.driver is not None else {},
    }


class Decode:
    """A captured CUDA graph of one decode step of 64 sequences, replayed with or without the connector around it."""

    def __init__(self, model: Model, tables: torch.Tensor, position: int) -> None:
        self.tokens = torch.zeros(DECODE_SEQUENCES, dtype=torch.long, device="cuda")
        self.position = torch.full((DECODE_SEQUENCES,), position, dtype=torch.long, device="cuda")
        self.tables = tables  # the graph reads them at every replay
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            model.decode(self.tokens, self.position, tables)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.sampled = model.decode(self.tokens, self.position, tables)

    def step(self) -> torch.Tensor:
        self.graph.replay()
        self.position += 1
        return self.sampled


def decode(model: Model, serving: Serving, bare: Serving, connection: Connection, rng: random.Random) -> dict[str, Any]:
    """Decode of 64 sequences: segments of steps with s3kv and without, alternating, results read one step late."""
    per_step: dict[str, list[float]] = {"with": [], "without": []}
    blocks = (DECODE_CONTEXT + DECODE_STEPS * DECODE_SEGMENTS) // model.shape.block + 1
    setups = {}
    for name, each in (("with", serving), ("without", bare)):
        requests = [each.request(prompt(rng, DECODE_CONTEXT, model.shape.vocab)) for _ in range(DECODE_SEQUENCES)]
        for request in requests:
            held = each.pages.grow(request.request_id, blocks)
            if each.driver is not None:
                each.driver.query(request, 0)
                each.driver.honour(request, 0, False)
                each.driver.allocated(request, [held])
            request.context_chunk_size = DECODE_CONTEXT
        each.pass_over(requests, lambda: torch.zeros((), device="cuda"))
        for request in requests:
            request.context_current_position = DECODE_CONTEXT
            request.state = LlmRequestState.GENERATION_IN_PROGRESS
        tables = torch.tensor([each.pages.pages(r.request_id)[0] for r in requests], device="cuda")
        setups[name] = (each, requests, Decode(model, tables, DECODE_CONTEXT))
    settle(connection, serving)
    for segment in range(DECODE_SEGMENTS):
        order = ("with", "without") if segment % 2 == 0 else ("without", "with")
        for name in order:
            each, requests, steps = setups[name]
            previous: torch.Tensor | None = None
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(DECODE_STEPS):
                each.pass_over(requests, steps.step, generation=True)
                if previous is not None:
                    previous.tolist()
                previous = each.result.clone()
                for request in requests:
                    request._tokens.append(7)
            torch.cuda.synchronize()
            if segment > 1:
                per_step[name].append((time.perf_counter() - begin) / DECODE_STEPS * 1e3)
    for each, requests, _ in setups.values():
        for request in requests:
            each.finish(request)
    with_ms, without_ms = statistics.median(per_step["with"]), statistics.median(per_step["without"])
    return {
        "sequences": DECODE_SEQUENCES, "context": DECODE_CONTEXT, "with_ms": with_ms, "without_ms": without_ms,
        "ratio": with_ms / without_ms, "all_ms": per_step,
    }  # fmt: skip


def codec_gain(model: Model, serving: Serving) -> dict[str, float]:
    """Compression of KV that the model left on the device: all layers of 16 blocks of one prompt."""
    pages = [page.cpu().contiguous().view(torch.uint8).numpy() for page in model.pool[:16]]
    raw = sum(page.nbytes for page in pages)
    gains = {}
    for name in ("zstd", "auto"):
        stored = sum(encode_page(memoryview(page).cast("B"), Codec(name), 2).length for page in pages)  # type: ignore[arg-type]
        gains[name] = raw / stored
    return gains


def first_tokens(
    model: Model, serving: Serving, bare: Serving, connection: Connection, rng: random.Random
) -> list[Any]:
    """Computed and from the node's tier, at each length; leaves the prompts in the bucket and returns them too."""
    rows = []
    for length in PROMPTS:
        tokens = prompt(rng, length + 1, model.shape.vocab)
        bare.first_token(prompt(rng, min(length, CHUNK), model.shape.vocab))
        computed = statistics.median(bare.first_token(tokens)[0] for _ in range(3 if length < 100_000 else 1))
        serving.first_token(tokens)
        settle(connection, serving)
        tier = [serving.first_token(tokens) for _ in range(5)]
        rows.append(
            {
                "tokens": length, "computed_s": computed, "tier_s": statistics.median(s for s, _ in tier),
                "tier_loaded": tier[-1][1], "tier_all_s": [s for s, _ in tier],
                "match_s": serving.calls.seconds["match"][-5:], "prompt": tokens,
            }
        )  # fmt: skip
        print(
            f"{length:7d} tokens: computed {computed:.3f} s, from the tier {rows[-1]['tier_s']:.3f} s "
            f"{[round(s, 3) for s, _ in tier]}, match {[round(s, 4) for s in rows[-1]['match_s']]}",
            flush=True,
        )
    return rows


def run(rng: random.Random) -> dict[str, Any]:
    shape = Shape()
    blocks = (2 * PROMPTS[-1]) // shape.block + 64
    model = Model(shape, blocks)
    capacity = 22 * GIB
    result: dict[str, Any] = {"block_bytes": shape.block_bytes}
    with tempfile.TemporaryDirectory() as name, bucket_folder() as bucket, install("both", False):
        folder = Path(name)
        settings = settings_for(folder, bucket, capacity)
        with agent(settings, folder) as connection:
            driver = attach(model, settings, folder)
            pages = Pages(blocks)
            serving, bare = Serving(model, driver, pages), Serving(model, attach_idle(), pages)
            result["pass"] = passes(model, serving, bare, connection, rng)
            print("pass", result["pass"], flush=True)
            result["decode"] = decode(model, serving, bare, connection, rng)
            print("decode", {k: v for k, v in result["decode"].items() if k != "all_ms"}, flush=True)
            settle(connection, serving)
            forget(connection)
            result["calls_us"] = {"s3kv": serving.calls.medians_us(), "idle": bare.calls.medians_us()}
            print("calls", result["calls_us"], flush=True)
            result["codec"] = codec_gain(model, serving)
            print("codec", result["codec"], flush=True)
            rows = first_tokens(model, serving, bare, connection, rng)
            result["status"] = status(connection)["totals"]
            driver.shutdown()
        for latency_s, bytes_per_s in NETWORKS:
            with agent(settings, folder, latency_s, bytes_per_s) as connection:
                driver = attach(model, settings, folder)
                serving = Serving(model, driver, Pages(blocks))
                for row in rows:
                    forget(connection)
                    seconds, loaded = serving.first_token(row["prompt"])
                    row.setdefault("bucket", []).append(
                        {"latency_s": latency_s, "bytes_per_s": bytes_per_s, "s": seconds, "loaded": loaded}
                    )
                    print(
                        f"{row['tokens']:7d} tokens from the bucket, {1e3 * latency_s:.0f} ms, "
                        f"{bytes_per_s / 1e9:.0f} GB/s cap: {seconds:.3f} s, {loaded} loaded",
                        flush=True,
                    )
                driver.shutdown()
        for row in rows:
            del row["prompt"]
        result["first_token"] = rows
    return result
