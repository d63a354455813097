"""One chaos run: a storm over real processes, calm, then proof that nothing is wrong and nothing is lost for good.

1. Storm: agents and engines serve the plan's requests again and again while the plan's faults happen; what dies is
   started again, as a service manager and an orchestrator would.
2. Calm: no more faults. Agents that lived through the storm are not restarted. What engines held must come back.
3. Healing: a fresh engine serves every prompt, the agents flush, the tiers are emptied; again, until every prompt's
   whole blocks are loaded from the bucket: the hit rate from before the faults.
4. Audit from outside: see `chaos_audit`.

Every token and score of every request is compared with a run without s3kv.
"""

from __future__ import annotations

import heapq
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.faulty_proxy import FaultyProxy

from benchmarks import chaos_harm as harm
from benchmarks import chaos_processes as processes
from benchmarks.chaos_plan import Action, ChaosPlan, Death
from s3kv.client.connection import Connection
from s3kv.client.protocol import Done, Drain, Drained, Forget
from s3kv.errors import S3kvError
from s3kv.settings import Settings
from s3kv.sim.config import SimConfig
from s3kv.sim.demo import write_settings
from s3kv.sim.engine import Engine
from s3kv.store.opening import open_unguarded

RESTART_S = 0.1
QUIET_S = 12.0
ROUND_S = 40.0
HEAL_ROUNDS = 5
SCORE_TOLERANCE = 1e-9
HELD_GAUGES = ("pinned", "arriving", "quarantined", "doomed", "uploading", "fetching", "engines", "waiting", "dirty")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.chaos_processes"])


@dataclass
class Outcome:
    """What a run came to. `problems` empty: every promise held."""

    seed: int
    store: str
    requests: int = 0
    wrong_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass
class Member:
    """A process of the run and the pipe to it."""

    process: Any = None
    pipe: Any = None
    ready: tuple[Any, ...] = ()
    stopping: bool = False

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    @property
    def pids(self) -> list[int]:
        """Its own and, of an engine, its ranks'."""
        ranks = self.ready[0] if self.ready and isinstance(self.ready[0], list) else []
        return [self.process.pid, *ranks]

    def signal(self, number: signal.Signals) -> bool:
        if not self.alive:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        return True

    def tell(self, *message: Any) -> None:
        if self.pipe is not None:
            with suppress(OSError):
                self.pipe.send(message)

    def end(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.process.kill()
        if self.process is not None:
            self.process.join(5)
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None


class ChaosRun:
    """`place` are values of the store section; with `proxy` requests go through it, and `direct` past it."""

    def __init__(self, plan: ChaosPlan, folder: Path, direct: dict[str, Any], proxy: FaultyProxy | None = None) -> None:
        self.plan = plan
        self.folder = folder
        self.outcome = Outcome(plan.seed, plan.store)
        self.rng = random.Random(f"run {plan.seed}")
        self.direct = Settings.model_validate({"store": direct}).store
        self._store_values = direct if proxy is None else direct | {"endpoint": proxy.endpoint}
        self._proxy = proxy
        self.bucket = harm.BucketHarm(open_unguarded(self.direct), self.rng)
        self.agents = [Member() for _ in range(plan.agents)]
        self.engines = [Member() for _ in plan.engines]
        self.collectors: list[Member] = []
        self.spares: list[Member] = []
        self._others: dict[int, harm.OtherVersion] = {}
        self._lifts: list[Callable[[], None]] = []
        self._agent_deaths: list[Death | None] = list(plan.agent_deaths) or [None] * plan.agents
        self._engine_deaths: list[Death | None] = list(plan.engine_deaths) or [None] * len(plan.engines)
        self._collector_deaths: list[Death | None] = list(plan.collector_deaths)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._storm = True
        self._limited = False
        self._lived = [True] * plan.agents
        self.reports: list[dict[str, Any]] = []
        self.expected = self._expected()

    # ---- the whole

    def run(self) -> Outcome:
        began = time.monotonic()
        try:
            self._prepare()
            self._weather()
            self._calm()
            self._heal()
            self._finish()
        except Exception as error:
            self.problem(f"the run stopped: {type(error).__name__}: {error}")
        finally:
            self._end_all()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

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

    def _prepare(self) -> None:
        for node in range(self.plan.agents):
            for patient in (False, True):
                write_settings(self.settings(node, patient=patient), self._config(node, patient))
        if self._proxy is not None:
            self._proxy.clear()
        for node in range(self.plan.agents):
            self._start_agent(node)
        for index in range(len(self.engines)):
            self._start_engine(index)

    def _config(self, node: int, patient: bool) -> Path:
        return self.folder / f"n{node}" / ("patient.yaml" if patient else "s3kv.yaml")

    # ---- processes

    def _start(self, member: Member, target: Callable[..., None], *arguments: Any, name: str) -> None:
        member.end()
        member.pipe, theirs = _context.Pipe()
        log = self.folder / f"{name}.log"
        member.ready, member.stopping = (), False
        member.process = _context.Process(target=target, args=(*arguments, theirs, log))
        member.process.start()
        theirs.close()

    def _start_agent(self, node: int) -> None:
        if node in self._others:
            return
        death, self._agent_deaths[node] = self._agent_deaths[node], None
        rates = self.plan.rates if self._storm else {}
        arguments = (self.settings(node), self.plan.seed + node, rates, death if self._storm else None)
        self._start(self.agents[node], processes.agent_main, *arguments, name=f"agent{node}")

    def _start_engine(self, index: int) -> None:
        death, self._engine_deaths[index] = self._engine_deaths[index], None
        arguments = (
            self._config(self.plan.engines[index], False), f"engine{index}", self.plan.sim, self.plan.requests, death,
            self.rng.random() < 0.3,
        )  # fmt: skip
        self._start(self.engines[index], processes.engine_main, *arguments, name=f"engine{index}")

    def _start_collector(self, how: str) -> None:
        member = Member()
        death = self._collector_deaths.pop() if self._collector_deaths else None
        member.process = _context.Process(
            target=processes.collector_main,
            args=(self.settings(0), how, self.plan.seed, self.plan.rates, death, self.folder / "collector.log"),
        )
        member.process.start()
        self.collectors.append(member)

    # ---- storm

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), work))

    def _weather(self) -> None:
        plan = self.plan
        if self._proxy is not None:
            self._proxy.rule(harm.http_rule(plan.seed, plan.http_rate, self.outcome.faults))
        for action in plan.actions:
            self.later(action.at_s, lambda action=action: self._act(action))  # type: ignore[misc]
        self._turn(plan.storm_s)

    def _turn(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass: timers, messages, deaths. True as soon as `until()`."""
        end = time.monotonic() + seconds
        while not until():
            now = time.monotonic()
            if now >= end:
                return False
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            due = self._timers[0][0] if self._timers else end
            self._listen(min(max(0.0, min(due, end) - time.monotonic()), 0.05))
            self._tend()
        return True

    def _listen(self, timeout_s: float) -> None:
        members = {each.pipe: each for each in (*self.agents, *self.engines) if each.pipe is not None}
        for pipe in multiprocessing.connection.wait(list(members), timeout_s):
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
                self._heard(member, *message)

    def _heard(self, member: Member, what: str, *values: Any) -> None:
        if what == "ready":
            member.ready = values
        elif what == "result":
            self.judge(*values)
        elif what == "round":
            member.tell("again" if self._storm else "end")
        elif what == "stalled":
            if self.plan.sections["load"]["policy"] == "park":
                # A parked load that failed is never reported complete, and the runtime cancels no parked request.
                self.outcome.notes["engines ended because a parked load failed"] += 1
                member.signal(signal.SIGKILL)
            else:
                self.problem(f"requests {values[0]} made no progress")
        elif what == "error" and "the process of rank" in values[0]:
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

    def _tend(self) -> None:
        """Start again what has died, wake what has stopped itself, note kills."""
        for node, agent in enumerate(self.agents):
            if agent.process is not None and not agent.alive:
                self._note_end("agent", agent.process.exitcode)
                self._lived[node] = False
                agent.process = None
                self.later(RESTART_S, lambda node=node: self._restart_agent(node))  # type: ignore[misc]
        for index, engine in enumerate(self.engines):
            if engine.process is not None and not engine.alive:
                self._drain_pipe(engine)
                self._note_end("engine", engine.process.exitcode)
                engine.process = None
                if self._storm:
                    self.later(RESTART_S, lambda index=index: self._start_engine(index))  # type: ignore[misc]
        for collector in [each for each in self.collectors if not each.alive]:
            self._note_end("collector", collector.process.exitcode)
            if collector.process.exitcode == 4:
                self.problem("a collector failed: see collector.log")
            self.collectors.remove(collector)
        for member in (*self.agents, *self.engines, *self.collectors):
            if member.alive and not member.stopping and any(_stopped(pid) for pid in member.pids):
                member.stopping = True
                self.outcome.kills["stopped at a step"] += 1
                self.later(self.rng.uniform(0.05, 0.4), lambda member=member: self._wake(member))  # type: ignore[misc]

    def _wake(self, member: Member) -> None:
        for pid in member.pids if member.alive else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        member.stopping = False

    def _drain_pipe(self, member: Member) -> None:
        with suppress(EOFError, OSError):
            while member.pipe is not None and member.pipe.poll():
                self._heard(member, *member.pipe.recv())

    def _restart_agent(self, node: int) -> None:
        if not self.agents[node].alive:
            self._start_agent(node)

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

    def _act(self, action: Action) -> None:
        done = getattr(self, f"_do_{action.kind}")(action)
        if done is not False:
            self.outcome.faults[action.kind] += 1

    def _pause(self, member: Member, seconds: float) -> bool:
        if member.stopping or not member.signal(signal.SIGSTOP):
            return False
        member.stopping = True
        self.later(seconds, lambda: self._wake(member))
        return True

    def _do_agent_kill(self, action: Action) -> bool:
        return self.agents[action.target].signal(signal.SIGKILL)

    def _do_agent_stop(self, action: Action) -> bool:
        return self._pause(self.agents[action.target], action.value)

    def _do_agent_term(self, action: Action) -> bool:
        return self.agents[action.target].signal(signal.SIGTERM)

    def _do_agent_race(self, action: Action) -> None:
        for _ in range(2):
            spare = Member()
            arguments = (self.settings(action.target), self.plan.seed, self.plan.rates, None)
            self._start(spare, processes.agent_main, *arguments, name="spare")
            self.spares.append(spare)

    def _do_other_version(self, action: Action) -> None:
        node = action.target
        if node not in self._others:
            self.agents[node].signal(signal.SIGKILL)
            self._others[node] = harm.OtherVersion(self.settings(node).agent.socket)
            self.later(action.value, lambda: self._end_other(node))

    def _end_other(self, node: int) -> None:
        if (other := self._others.pop(node, None)) is not None:
            other.close()
        if self._storm and not self.agents[node].alive:
            self._start_agent(node)

    def _do_engine_kill(self, action: Action) -> bool:
        return self.engines[action.target].signal(signal.SIGKILL)

    def _do_engine_stop(self, action: Action) -> bool:
        return self._pause(self.engines[action.target], action.value)

    def _rank(self, action: Action) -> int | None:
        engine = self.engines[action.target]
        pids = engine.ready[0] if engine.alive and engine.ready else []
        return pids[int(action.value * 100) % len(pids)] if pids else None

    def _do_rank_kill(self, action: Action) -> bool:
        pid = self._rank(action)
        if pid is None:
            return False
        engine = self.engines[action.target]
        engine.stopping = True  # the runtime's own error is expected now: an engine without a rank is over
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.outcome.kills["rank killed"] += 1
        self.later(0.2, lambda: engine.signal(signal.SIGKILL) and None)
        return True

    def _do_rank_stop(self, action: Action) -> bool:
        pid = self._rank(action)
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)

        def wake() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self.later(action.value, wake)
        self._lifts.append(wake)
        return True

    def _do_outage(self, action: Action) -> None:
        self._set_outage(True)
        self.later(action.value, lambda: self._set_outage(False))

    def _set_outage(self, on: bool) -> None:
        if self._proxy is not None:
            self._proxy.outage = on
        for agent in self.agents:
            if agent.alive:
                agent.tell("outage", on)

    def _do_unlink_socket(self, action: Action) -> None:
        self.settings(action.target).agent.socket.unlink(missing_ok=True)

    def _harm_bucket(self, action: Action) -> bool:
        return bool(harm.run_now(self.bucket.harm(action.kind)))

    _do_delete_object = _do_flip_object = _do_cut_object = _harm_bucket

    def _do_wipe_index(self, action: Action) -> None:
        self.agents[action.target].signal(signal.SIGKILL)
        harm.wipe(self.folder / f"n{action.target}" / "index")

    def _do_garbage_client(self, action: Action) -> None:
        harm.garbage_client(self.settings(action.target).agent.socket, self.rng)

    def _do_lying_client(self, action: Action) -> None:
        harm.lying_client(self.settings(action.target).agent.socket, self._namespace_json(), self.rng)

    def _namespace_json(self) -> bytes | None:
        from s3kv.catalog.browse import find_namespaces

        with suppress(S3kvError, OSError, TimeoutError):
            found = harm.run_now(find_namespaces(open_unguarded(self.direct))).namespaces
            return found[0].to_json() if found else None
        return None

    def _do_mute_client(self, action: Action) -> None:
        harm.mute_client(self.settings(action.target).agent.socket)

    def _do_collect(self, action: Action) -> None:
        self._start_collector("collect")

    def _do_compact(self, action: Action) -> None:
        self._start_collector("compact")

    def _do_merge(self, action: Action) -> None:
        self._start_collector("merge")

    def _do_collector_kill(self, action: Action) -> None:
        self._start_collector("collect")
        collector = self.collectors[-1]
        self.later(action.value / 2, lambda: collector.signal(signal.SIGKILL) and None)

    def _do_collector_stop(self, action: Action) -> None:
        self._start_collector("collect")
        collector = self.collectors[-1]
        self.later(action.value / 4, lambda: self._pause(collector, action.value) and None)

    def _limit(self, action: Action, squeeze: Callable[[int], Callable[[], None]]) -> bool:
        agent = self.agents[action.target]
        if not agent.alive or self._limited:
            return False
        lift = squeeze(agent.process.pid)
        self._limited = True

        def lift_once() -> None:
            lift()
            self._limited = False

        self._lifts.append(lift)
        self.later(action.value, lift_once)
        return True

    def _do_descriptors(self, action: Action) -> bool:
        return self._limit(action, harm.squeeze_descriptors)

    def _do_disk_full(self, action: Action) -> bool:
        return self._limit(action, harm.fill_disk)

    # ---- calm, healing, the end

    def _calm(self) -> None:
        self._storm = False
        self._set_outage(False)
        if self._proxy is not None:
            self._proxy.clear()
        for lift in self._lifts:
            lift()
        for member in (*self.collectors, *self.spares):
            member.end()
        for node in list(self._others):
            self._end_other(node)
        for member in (*self.agents, *self.engines):
            self._wake(member)
        self._timers.clear()
        self._limited = False
        self._tend()
        for node, agent in enumerate(self.agents):
            if agent.alive:
                agent.tell("rates", {})
                self.outcome.notes["agents that lived through the storm"] += 1
            else:
                self._start_agent(node)
        if not self._turn(ROUND_S, lambda: not any(engine.alive for engine in self.engines)):
            self.problem("an engine did not end its round after the storm")
        for engine in self.engines:
            self._drain_pipe(engine)
            engine.end()
            engine.process = None
        for node, agent in enumerate(self.agents):
            if not self._turn(20.0, lambda agent=agent: bool(agent.ready)):  # type: ignore[misc]
                self.problem(f"agent {node} did not get ready")
        self._flush("after the storm")

    def report(self, node: int) -> dict[str, Any]:
        """What agent `node` says of itself."""
        self.reports.clear()
        for _ in range(10):  # it may just be ending, and another one be started
            self.agents[node].tell("report")
            if self._turn(2.0, lambda: bool(self.reports)):
                return self.reports.pop()
        raise RuntimeError(f"agent {node} gives no report")

    @contextmanager
    def _talking(self, node: int) -> Iterator[Connection]:
        connection: Connection | None = None
        for _ in range(100):  # a socket that vanished is back within a second or so
            with suppress(S3kvError):
                connection = Connection.open(self.settings(node).agent.socket, "cli", timeout_s=10.0)
                break
            self._turn(0.05)
        if connection is None:
            raise RuntimeError(f"agent {node} cannot be reached")
        try:
            yield connection
        finally:
            connection.close()

    def _flush(self, when: str) -> None:
        """Drain every agent, wait until nothing is held any more, empty the tiers, let catalogs catch up."""
        for node in range(self.plan.agents):
            with self._talking(node) as talk:
                drained = talk.call(Drain(talk.next_id(), 10.0), Drained, timeout_s=20.0)
                self.outcome.notes[f"blocks not stored {when.partition(' round')[0]}"] += drained.unsaved_blocks
            self._wait_quiet(node, when)
            with self._talking(node) as talk:
                talk.call(Forget(talk.next_id(), ""), Done, timeout_s=10.0)
        for node in range(self.plan.agents):
            seen = self.report(node)["gauges"].get("polls", 0)
            self._turn(QUIET_S, lambda node=node, seen=seen: self._polled(node, seen))  # type: ignore[misc]

    def _polled(self, node: int, seen: int) -> bool:
        polls = self.report(node)["gauges"].get("polls")
        return polls is None or polls >= seen + 2

    def _wait_quiet(self, node: int, when: str) -> None:
        end = time.monotonic() + QUIET_S
        while True:
            gauges = self.report(node)["gauges"]
            held = {name: gauges[name] for name in HELD_GAUGES if gauges.get(name)}
            if not held:
                return
            if time.monotonic() >= end:
                self.problem(f"{when}: agent {node} still holds {held}")
                return
            self._turn(0.05)

    def _heal(self) -> None:
        """Rounds of one fresh engine, on the last agent, until all that can be loaded is."""
        node = self.plan.agents - 1
        healer = Member()
        self.engines = [healer]
        with self._talking(node):
            pass  # an engine connects once at its start, then at its own pace
        arguments = (self._config(node, True), "healer", self.plan.sim, self.plan.requests, None, True)
        self._start(healer, processes.engine_main, *arguments, name="healer")
        block = SimConfig.from_json(self.plan.sim).tokens_per_block
        loadable = sum((len(request.prompt_tokens) - 1) // block * block for request in self.plan.requests)
        # V1 reports no pages of a window that has moved on, and saves only once reports have proved its block size:
        # there the hit rate that can be had is the one that does not rise any more, as without faults.
        settles = self.plan.sim["manager"] == "v1"
        loaded = -1
        for number in range(1, HEAL_ROUNDS + 1):
            before, loaded = loaded, self._one_round(healer)
            self._flush_while_attached(f"healing round {number}")
            if loaded >= loadable or (settles and loaded == before):
                self.outcome.notes[f"healed by round {number}"] += 1
                self.outcome.notes["tokens loadable"] += loadable
                self.outcome.notes["tokens loaded when healed"] += loaded
                break
            healer.tell("again")
        else:
            self.problem(f"{loaded} of {loadable} tokens were loaded in healing round {HEAL_ROUNDS}")
        healer.tell("end")
        self._turn(ROUND_S, lambda: not healer.alive)
        healer.end()
        healer.process = None

    def _one_round(self, healer: Member) -> int:
        """Tokens loaded in this round."""
        loaded, over = [0], [False]
        heard = self._heard

        def listen(member: Member, what: str, *values: Any) -> None:
            if what == "round":
                over[0] = True
                return
            if what == "result":
                loaded[0] += values[1]["loaded_tokens"]
            heard(member, what, *values)

        self._heard = listen  # type: ignore[method-assign]
        try:
            self._turn(ROUND_S, lambda: over[0] or not healer.alive)
        finally:
            self._heard = heard  # type: ignore[method-assign]
        if not over[0]:
            raise RuntimeError("the healing engine did not end its round")
        return loaded[0]

    def _flush_while_attached(self, when: str) -> None:
        global HELD_GAUGES
        before = HELD_GAUGES
        HELD_GAUGES = tuple(name for name in before if name != "engines")
        try:
            self._flush(when)
        finally:
            HELD_GAUGES = before

    def _finish(self) -> None:
        from benchmarks.chaos_audit import audit

        for node, agent in enumerate(self.agents):
            self._wait_quiet(node, "at the end")
            said = self.report(node)
            self.outcome.problems += [f"agent {node}: {text}" for text in said["problems"]]
            self.outcome.faults.update({f"store {name}": count for name, count in said["faults"].items()})
            self._compare_resources(node, said)
            (self.folder / f"metrics{node}.txt").write_text(said["metrics"])
            agent.signal(signal.SIGTERM)
        for node, agent in enumerate(self.agents):
            agent.process.join(15.0)
            if agent.alive or agent.process.exitcode != 0:
                self.problem(f"agent {node} ended with status {agent.process.exitcode} after SIGTERM")
            agent.end()
            agent.process = None
        audit(self)

    def _compare_resources(self, node: int, said: dict[str, Any]) -> None:
        """Once nobody is connected: what a namespace and the store's pool keep open, and no more than that."""
        descriptors, threads = self.agents[node].ready
        allowed = 16 + (self.plan.sections["store"]["max_connections"] if self.plan.store == "s3" else 0)
        if said["descriptors"] > descriptors + allowed:
            self.problem(f"agent {node} has {said['descriptors']} descriptors, {descriptors} at its start")
        if said["threads"] > threads + 40:
            self.problem(f"agent {node} has {said['threads']} threads, {threads} at its start")
        self.outcome.notes["agent anonymous memory KiB, most"] = max(
            said["resident_kib"], self.outcome.notes["agent anonymous memory KiB, most"]
        )

    def _end_all(self) -> None:
        for other in self._others.values():
            other.close()
        for member in (*self.engines, *self.agents, *self.spares, *self.collectors):
            member.end()

    def to_json(self) -> str:
        return json.dumps(vars(self.outcome), default=dict)


def _stopped(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
