"""The first half of a chaos run: its processes, the storm over them, and the judgement of every result."""

from __future__ import annotations

import heapq
import itertools
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.faulty_proxy import FaultyProxy

from benchmarks import chaos_harm as harm
from benchmarks import chaos_processes as processes
from benchmarks.chaos_actions import Actions
from benchmarks.chaos_member import Member, Outcome, is_stopped
from benchmarks.chaos_plan import ChaosPlan, Death
from s3kv.settings import Settings
from s3kv.sim.config import SimConfig
from s3kv.sim.demo import write_settings
from s3kv.sim.engine import Engine
from s3kv.store.opening import open_unguarded

RESTART_S = 0.1
START_S = 15.0
LOST_RANK = ("the process of rank", "gloo/transport")
"""How an engine's own error names a rank that died: by itself, or by the others' broken collective."""
SCORE_TOLERANCE = 1e-9

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.chaos_processes"])


class Storm(Actions):
    """`place` are values of the store section; with `proxy` requests go through it, and `direct` past it."""

    def __init__(self, plan: ChaosPlan, folder: Path, direct: dict[str, Any], proxy: FaultyProxy | None = None) -> None:
        self.plan = plan
        self.folder = folder
        self.outcome = Outcome(plan.seed, plan.store)
        self.rng = random.Random(f"run {plan.seed}")
        self.direct = Settings.model_validate({"store": direct}).store
        self._store_values = direct if proxy is None else direct | {"endpoint": proxy.endpoint}
        self.proxy = proxy
        self.bucket = harm.BucketHarm(open_unguarded(self.direct), self.rng)
        self.agents = [Member() for _ in range(plan.agents)]
        self.engines = [Member() for _ in plan.engines]
        self.collectors: list[Member] = []
        self.spares: list[Member] = []
        self.others: dict[int, harm.OtherVersion] = {}
        self.lifts: list[Callable[[], None]] = []
        self._agent_deaths: list[Death | None] = list(plan.agent_deaths) or [None] * plan.agents
        self._engine_deaths: list[Death | None] = list(plan.engine_deaths) or [None] * len(plan.engines)
        self._collector_deaths: list[Death | None] = list(plan.collector_deaths)
        self.timers: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self.storming = True
        self.limited = False
        self.reports: list[dict[str, Any]] = []
        self.expected = self._expected()

    def problem(self, text: str) -> None:
        self.outcome.problems.append(text)

    def _expected(self) -> list[dict[str, Any]]:
        sim = {name: value for name, value in self.plan.sim.items() if name in ("model", "manager")}
        with Engine(SimConfig.from_json(sim | {"reuse": False})) as engine:
            return [result.to_json() for result in engine.generate(self.plan.requests)]

    def settings(self, node: int, *, patient: bool = False) -> Settings:
        home = self.folder / f"n{node}"
        home.mkdir(exist_ok=True)
        sections: dict[str, Any] = {name: dict(values) for name, values in self.plan.sections.items()}
        sections["store"] |= self._store_values
        sections["agent"]["socket"] = home / "agent.sock"
        sections["catalog"]["index_dir"] = home / "index"
        sections["identity"] = {"fingerprint": "simulated, seed 0", "extra": {"chaos": str(self.plan.seed)}}
        if patient:
            sections["load"] |= {"policy": "wait", "wait_ms_per_1k_tokens": 1e6, "wait_cap_ms": 20_000.0}
            sections["agent"] |= {"call_timeout_s": 10.0}
        return Settings.model_validate(sections)

    def prepare(self) -> None:
        for node in range(self.plan.agents):
            for patient in (False, True):
                write_settings(self.settings(node, patient=patient), self.config(node, patient))
        if self.proxy is not None:
            self.proxy.clear()
        for node in range(self.plan.agents):
            self.start_agent(node)
        for index in range(len(self.engines)):
            self._start_engine(index)

    def config(self, node: int, patient: bool) -> Path:
        return self.folder / f"n{node}" / ("patient.yaml" if patient else "s3kv.yaml")

    # ---- processes

    def start(self, member: Member, target: Callable[..., None], *arguments: Any, name: str) -> None:
        member.end()
        member.pipe, theirs = _context.Pipe()
        log = self.folder / f"{name}.log"
        member.ready, member.stopping = (), False
        member.process = _context.Process(target=target, args=(*arguments, theirs, log))
        member.process.start()
        theirs.close()

    def start_agent(self, node: int) -> None:
        if node in self.others:
            return
        death, self._agent_deaths[node] = self._agent_deaths[node], None
        rates = self.plan.rates if self.storming else {}
        arguments = (self.settings(node), self.plan.seed + node, rates, death if self.storming else None)
        self.start(self.agents[node], processes.agent_main, *arguments, name=f"agent{node}")

    def _start_engine(self, index: int) -> None:
        death, self._engine_deaths[index] = self._engine_deaths[index], None
        arguments = (
            self.config(self.plan.engines[index], False), f"engine{index}", self.plan.sim, self.plan.requests, death,
            self.rng.random() < 0.3,
        )  # fmt: skip
        self.start(self.engines[index], processes.engine_main, *arguments, name=f"engine{index}")

    def start_collector(self, how: str) -> Member:
        member = Member()
        death = self._collector_deaths.pop() if self._collector_deaths else None
        member.process = _context.Process(
            target=processes.collector_main,
            args=(self.settings(0), how, self.plan.seed, self.plan.rates, death, self.folder / "collector.log"),
        )
        member.process.start()
        self.collectors.append(member)
        return member

    # ---- storm

    def later(self, delay_s: float, work: Callable[[], object]) -> None:
        heapq.heappush(self.timers, (time.monotonic() + delay_s, next(self._order), work))

    def weather(self) -> None:
        plan = self.plan
        # A storm over processes that are still starting would be over before they do anything.
        self.turn(START_S, lambda: all(member.ready for member in (*self.agents, *self.engines)))
        if self.proxy is not None:
            self.proxy.rule(harm.http_rule(plan.seed, plan.http_rate, self.outcome.faults))
        for action in plan.actions:
            self.later(action.at_s, lambda action=action: self.act(action))  # type: ignore[misc]
        self.turn(plan.storm_s)

    def turn(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass: timers, messages, deaths. True as soon as `until()`."""
        end = time.monotonic() + seconds
        while not until():
            now = time.monotonic()
            if now >= end:
                return False
            while self.timers and self.timers[0][0] <= now:
                heapq.heappop(self.timers)[2]()
            due = self.timers[0][0] if self.timers else end
            self._listen(min(max(0.0, min(due, end) - time.monotonic()), 0.05))
            self.tend()
        return True

    def _listen(self, timeout_s: float) -> None:
        members: dict[Any, Member] = {
            each.pipe: each for each in (*self.agents, *self.engines) if each.pipe is not None
        }
        ready: Any = multiprocessing.connection.wait(list(members), timeout_s)
        for pipe in ready:
            member = members[pipe]
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                member.pipe.close()
                member.pipe = None
                continue
            if isinstance(message, dict):
                self.reports.append(message)
            else:
                self.heard(member, *message)

    def heard(self, member: Member, what: str, *values: Any) -> None:
        if what == "ready":
            member.ready = values
        elif what == "result":
            self.judge(*values)
        elif what == "round":
            member.tell("again" if self.storming else "end")
        elif what == "stalled":
            if self.plan.sections["load"]["policy"] == "park":
                # A parked load that failed is never reported complete, and the runtime cancels no parked request.
                self.outcome.notes["engines ended because a parked load failed"] += 1
                member.signal(signal.SIGKILL)
            else:
                self.problem(f"requests {values[0]} made no progress")
        elif what == "error" and any(sign in values[0] for sign in LOST_RANK):
            self.outcome.kills["engine that lost a rank"] += 1  # the runtime's own end: nothing can be served
        elif what == "error" and not member.stopping:
            self.problem(f"an engine stopped: {values[0]}")

    def judge(self, index: int, result: dict[str, Any]) -> None:
        """`index` is the request's id, from 1 on."""
        wanted = self.expected[index - 1]
        self.outcome.requests += 1
        tokens = list(result["tokens"])
        expected = list(wanted["tokens"])
        if result["error"] == "cancelled":
            expected = expected[: len(tokens)]
        elif result["error"]:
            self.problem(f"request {index}: {result['error']}")
        scores = zip(result["top_scores"], wanted["top_scores"], strict=False)
        if tokens != expected or any(not abs(one - other) <= SCORE_TOLERANCE for one, other in scores):
            self.outcome.wrong_tokens += 1
            self.problem(f"request {index}: wrong tokens {tokens} instead of {expected}")

    def tend(self) -> None:
        """Start again what has died, wake what has stopped itself, note kills."""
        for node, agent in enumerate(self.agents):
            if agent.process is not None and not agent.alive:
                self._note_end("agent", agent.process.exitcode)
                agent.process = None
                self.later(RESTART_S, lambda node=node: self._restart_agent(node))  # type: ignore[misc]
        for index, engine in enumerate(self.engines):
            if engine.process is not None and not engine.alive:
                self.drain_pipe(engine)
                self._note_end("engine", engine.process.exitcode)
                engine.process = None
                if self.storming:
                    self.later(RESTART_S, lambda index=index: self._start_engine(index))  # type: ignore[misc]
        for collector in [each for each in self.collectors if not each.alive]:
            self._note_end("collector", collector.process.exitcode)
            if collector.process.exitcode == 4:
                self.problem("a collector failed: see collector.log")
            self.collectors.remove(collector)
        for member in (*self.agents, *self.engines, *self.collectors):
            if member.alive and not member.stopping and any(is_stopped(pid) for pid in member.pids):
                member.stopping = True
                self.outcome.kills["stopped at a step"] += 1
                self.later(self.rng.uniform(0.05, 0.4), lambda member=member: self.wake(member))  # type: ignore[misc]

    def wake(self, member: Member) -> None:
        for pid in member.pids if member.alive else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        member.stopping = False

    def drain_pipe(self, member: Member) -> None:
        with suppress(EOFError, OSError):
            while member.pipe is not None and member.pipe.poll():
                self.heard(member, *member.pipe.recv())

    def _restart_agent(self, node: int) -> None:
        if not self.agents[node].alive:
            self.start_agent(node)

    def _note_end(self, who: str, code: int) -> None:
        if code == -signal.SIGKILL:
            self.outcome.kills[f"{who} killed"] += 1
        elif code == -signal.SIGTERM:
            self.outcome.kills[f"{who} terminated while it started"] += 1
        elif code < 0 or code > 4:
            self.problem(f"an {who} ended with status {code}")
        elif who == "agent":
            self.outcome.kills["agent terminated"] += 1
            if code == 1:
                self.outcome.notes["drains that left blocks behind"] += 1
