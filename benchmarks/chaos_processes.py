"""The processes of a chaos run: what runs in an agent, an engine and a collector, and the harm they do to themselves.

They are forked from a server that has imported everything (multiprocessing's forkserver), which makes a real process in
milliseconds. The agent is `s3kv.agent.service.Agent`, the engine the simulated runtime with `s3kv.connector`, the
collector what `s3kv gc` calls.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from support.servers import die_with_parent

from benchmarks.chaos_plan import Death
from s3kv.agent.service import Agent
from s3kv.catalog.browse import find_namespaces, temporary_catalog
from s3kv.client.engine import LeaderClient, WorkerClient
from s3kv.connector import scheduler, worker  # noqa: F401 - imported once, for all forks
from s3kv.errors import ConfigError, S3kvError
from s3kv.format import keys
from s3kv.settings import CONFIG_VARIABLE, Settings
from s3kv.sim.config import ConnectorConfig, SimConfig, SimRequest
from s3kv.sim.engine import Engine
from s3kv.sim.install import install
from s3kv.store.base import Store
from s3kv.store.faults import Fault, FaultPlan, FaultStore
from s3kv.store.guard import GuardedStore, Limits
from s3kv.store.opening import open_unguarded
from s3kv.store.wrapper import StoreWrapper
from s3kv.tier.block import State

CONNECTOR = ConnectorConfig("s3kv.connector", "S3KVScheduler", "S3KVWorker")
STALLED_ITERATIONS = 400
"""Iterations without progress after which the run is told."""


def kind_of(key: str) -> str:
    """What lies under a key: chunk, log, snap, namespace, lease or other."""
    for kind, parse in (
        ("chunk", keys.parse_chunk_key),
        ("log", keys.parse_log_key),
        ("snap", keys.parse_snap_key),
        ("namespace", keys.parse_namespace_key),
        ("lease", keys.parse_lease_key),
    ):
        if parse(key) is not None:
            return kind
    return "other"


def harm_self(death: Death) -> None:
    os.kill(os.getpid(), signal.SIGSTOP if death.stop else signal.SIGKILL)


class DeadlyStore(StoreWrapper):
    """Ends, or stops, this process at one call of one kind: a step of upload, publish, load, collect or compact."""

    def __init__(self, inner: Store, death: Death) -> None:
        super().__init__(inner)
        self._death = death
        self._left = death.nth
        self.armed = True

    async def _around(self, operation: str, key: str, call: Callable[[], Any]) -> Any:
        death = self._death
        if not self.armed or operation != death.operation or death.kind not in (kind_of(key), _list_kind(key)):
            return await call()
        self._left -= 1
        if self._left == 0 and not death.after:
            harm_self(death)
        result = await call()
        if self._left == 0 and death.after:
            harm_self(death)
        return result

    async def get_into(self, key: str, out: memoryview, offset: int = 0) -> Any:
        return await self._around("get", key, lambda: self._inner.get_into(key, out, offset))

    async def get_ranges(self, key: str, ranges: Any, outs: Any) -> Any:
        return await self._around("get", key, lambda: self._inner.get_ranges(key, ranges, outs))

    async def get(self, key: str, max_bytes: int) -> Any:
        return await self._around("get", key, lambda: self._inner.get(key, max_bytes))

    async def put(self, key: str, body: Any) -> Any:
        return await self._around("put", key, lambda: self._inner.put(key, body))

    async def put_if_absent(self, key: str, body: Any) -> Any:
        return await self._around("put", key, lambda: self._inner.put_if_absent(key, body))

    async def put_if_match(self, key: str, body: Any, etag: str) -> Any:
        return await self._around("put", key, lambda: self._inner.put_if_match(key, body, etag))

    async def head(self, key: str) -> Any:
        return await self._around("head", key, lambda: self._inner.head(key))

    async def delete(self, keys: Any) -> Any:
        return await self._around("delete", keys[0] if keys else "", lambda: self._inner.delete(keys))

    async def list(self, prefix: str, start_after: str | None = None) -> Any:
        await self._around("list", prefix, lambda: asyncio.sleep(0))
        async for page in self._inner.list(prefix, start_after):
            yield page


def _list_kind(prefix: str) -> str:
    return "log" if prefix.rstrip("/").endswith("/log") else ""


def open_harmed(settings: Settings, plan: FaultPlan, death: Death | None) -> GuardedStore:
    inner: Store = open_unguarded(settings.store)
    inner = FaultStore(inner, plan)
    if death is not None:
        inner = DeadlyStore(inner, death)
    return GuardedStore(inner, Limits.from_settings(settings.store))


def begin_child(log: Path) -> None:
    die_with_parent()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(stream=sys.stderr, level=logging.DEBUG, format="%(asctime)s %(process)d %(name)s %(message)s")
    for noisy in ("botocore", "asyncio", "urllib3", "boto3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


# ---- agent


def agent_main(
    settings: Settings, seed: int, rates: dict[str, float], death: Death | None, pipe: Any, log: Path
) -> None:
    """Serves until SIGTERM. On the pipe: ("rates", …), ("outage", bool) and ("report",), answered by a dict."""
    begin_child(log)
    plan = FaultPlan(seed, {Fault(name): rate for name, rate in rates.items()}, latency_s=0.05)
    try:
        code = asyncio.run(_agent(settings, plan, death, pipe))
    except ConfigError as error:
        print(f"s3kv: {error}", file=sys.stderr, flush=True)
        code = 3
    os._exit(code)


async def _agent(settings: Settings, plan: FaultPlan, death: Death | None, pipe: Any) -> int:
    store = open_harmed(settings, plan, death)
    agent = Agent(settings, store=store)
    loop = asyncio.get_running_loop()
    stopping: set[asyncio.Task[Any]] = set()

    def begin_stop() -> None:
        stopping.add(asyncio.create_task(agent.stop(settings.agent.drain_s)))

    def command() -> None:
        try:
            what, *values = pipe.recv()
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())
            return
        if what == "rates":
            plan.rates = {Fault(name): rate for name, rate in values[0].items()}
            if isinstance(store.inner, DeadlyStore):
                store.inner.armed = False
        elif what == "outage":
            plan.outage = values[0]
        else:
            pipe.send(report(agent, plan))

    loop.add_signal_handler(signal.SIGTERM, begin_stop)
    loop.add_reader(pipe.fileno(), command)

    def ready() -> None:
        pipe.send(("ready", descriptors(), threading.active_count()))

    _, unsaved = await agent.run(ready)
    return 1 if unsaved else 0


def report(agent: Agent, plan: FaultPlan) -> dict[str, Any]:
    """The tiers' full check, gauges that must be back at nothing, and what was injected."""
    problems: list[str] = []
    gauges: dict[str, int] = {}
    node = agent.node
    for namespace in node.namespaces.values() if node is not None else ():
        try:
            namespace.directory.check()
        except AssertionError as error:
            problems.append(f"directory.check: {error}")
        counters = namespace.directory.counters()
        for name in ("pinned", "quarantined", "doomed", "dirty"):
            gauges[name] = gauges.get(name, 0) + getattr(counters, name)
        # Blocks of which a rank that died never wrote its part are nobody's, and the first to be evicted.
        blocks = namespace.directory._table.occupied.values()
        arriving = sum(block.busy and block.state is not State.RESIDENT for block in blocks)
        gauges["arriving"] = gauges.get("arriving", 0) + arriving
        for name, value in (
            ("uploading", namespace.uploader.queued_chunks),
            ("waiting", namespace.packer.waiting_blocks),
            ("fetching", namespace.fetcher.running_chunks),
            ("engines", len(namespace.engines)),
            ("catalog_shut", not namespace.catalog_open.is_set()),
        ):
            gauges[name] = gauges.get(name, 0) + int(value)
        gauges["polls"] = gauges.get("polls", 0) + namespace.catalog.stats()["polls"]
    return {
        "problems": problems,
        "gauges": gauges,
        "metrics": agent.metrics.text().decode(),
        "descriptors": descriptors(),
        "threads": threading.active_count(),
        "resident_kib": _resident_kib(),
        "faults": {fault.value: count for fault, count in plan.counts.items()},
    }


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    return 0


# ---- engine


def engine_main(
    config: Path, name: str, sim: dict[str, Any], requests: tuple[SimRequest, ...], death: Death | None,
    one_by_one: bool, pipe: Any, log: Path,
) -> None:  # fmt: skip
    """Serves the requests over and over; ("again",) and ("end",) on the pipe say what comes after each time."""
    begin_child(log)
    os.environ[CONFIG_VARIABLE] = str(config)
    os.environ["S3KV_ENGINE_ID"] = name
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]  # ranks start in no time
    os.register_at_fork(after_in_child=die_with_parent)
    if death is not None:
        _arm(death)
    try:
        _serve(sim, requests, one_by_one, pipe)
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        os._exit(1)
    os._exit(0)


def _serve(sim: dict[str, Any], requests: tuple[SimRequest, ...], one_by_one: bool, pipe: Any) -> None:
    config = SimConfig.from_json(sim)
    with install("both"), Engine(config, CONNECTOR) as engine:
        ranks = [process.pid for process in getattr(engine._ranks, "_processes", [])]
        pipe.send(("ready", ranks))
        rounds = 0
        while True:
            batches = [[request] for request in requests] if one_by_one else [list(requests)]
            for batch in batches:
                _serve_batch(engine, batch, rounds, pipe)
                engine.reset_reuse()
            rounds += 1
            pipe.send(("round", rounds))
            if pipe.recv()[0] != "again":
                break
        began = time.monotonic()
    pipe.send(("ended", time.monotonic() - began))


def _serve_batch(engine: Engine, batch: list[SimRequest], rounds: int, pipe: Any) -> None:
    """As `Engine.run_until_done`, with results at once, and word when there is no progress."""
    base = 1000 * (rounds + 1)
    for request in batch:
        engine.submit(
            SimRequest(
                request_id=base + request.request_id, prompt_tokens=request.prompt_tokens,
                max_new_tokens=request.max_new_tokens, cache_salt=request.cache_salt,
                lora_task_id=request.lora_task_id,
            )
        )  # fmt: skip
    left = {base + request.request_id for request in batch}
    while not engine._is_idle:
        for result in engine.step():
            left.discard(result.request_id)
            pipe.send(("result", result.request_id - base, result.to_json()))
        if engine._stalled:
            engine._idle()
        if engine._stalled == STALLED_ITERATIONS:
            pipe.send(("stalled", sorted(each - base for each in left)))


def _arm(death: Death) -> None:
    """The nth call of one client method is the last, or a pause."""
    left = [death.nth]

    def harmful(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def around(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            last = left[0] == 0
            if last and not death.after:
                harm_self(death)
            result = method(*arguments, **named)
            if last and death.after:
                harm_self(death)
            return result

        return around

    for client in (LeaderClient, WorkerClient):
        if death.operation in vars(client):
            setattr(client, death.operation, harmful(getattr(client, death.operation)))


# ---- collector


def collector_main(
    settings: Settings, how: str, seed: int, rates: dict[str, float], death: Death | None, log: Path
) -> None:
    """One collection, merge or compaction, then the end. 0: done; 2: it gave up for a reason of its own."""
    begin_child(log)
    plan = FaultPlan(seed, {Fault(name): rate for name, rate in rates.items()}, latency_s=0.05)
    try:
        asyncio.run(_collect(settings, how, plan, death))
        code = 0
    except (S3kvError, OSError) as error:
        print(f"collector: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = 2
    except BaseException:
        traceback.print_exc()
        code = 4
    os._exit(code)


async def _collect(settings: Settings, how: str, plan: FaultPlan, death: Death | None) -> None:
    from s3kv.gc.round import LEASE_NAME, opened_round

    store = open_harmed(settings, plan, death)
    try:
        found = await find_namespaces(store)
        if how == "compact":
            for spec in found.namespaces:
                async with temporary_catalog(store, spec, settings.catalog) as catalog:
                    await catalog.compact(force=True)
            return
        async with opened_round(store, settings, found.namespaces) as opened:
            await _remove(settings, opened, merge=how == "merge", name=LEASE_NAME)
    finally:
        await store.close()


async def _remove(settings: Settings, opened: Any, *, merge: bool, name: str) -> None:
    """Half of what is stored goes; or small chunks are merged, and what the next catalog shows superseded goes."""
    from s3kv.gc.execute import Pace, execute
    from s3kv.gc.lease import Heartbeat, held
    from s3kv.gc.plan import Policy

    collect = settings.collect
    stored = sum(entry.added.size for catalog in opened.catalogs.values() for entry in catalog.iter_chunks())
    policy = Policy(time.time(), None if merge else stored // 2, None, merge)
    plan = opened.plan(policy, [])
    pace = Pace(collect.grace_s, collect.lease_s, time.monotonic, time.time, asyncio.sleep)
    holder = f"chaos {os.getpid()}"
    async with held(opened.store, name, holder, lease_s=collect.lease_s, sleep=asyncio.sleep) as lease:
        if merge:
            beat = Heartbeat(lease, collect.lease_s, time.monotonic)
            await opened.merge(opened.merges(plan), lambda count: None, beat)
            plan = opened.plan(policy, [])
        await execute(plan, opened.places, opened.store, lease, pace)
