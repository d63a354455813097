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

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks import chaos_processes as processes
from benchmarks.chaos_member import Member, Outcome
from benchmarks.chaos_storm import Storm
from s3kv.client.connection import Connection
from s3kv.client.protocol import Done, Drain, Drained, Forget
from s3kv.errors import AgentUnavailable, S3kvError
from s3kv.sim.config import SimConfig

QUIET_S = 12.0
ROUND_S = 40.0
HEAL_ROUNDS = 5
HELD_GAUGES = ("pinned", "arriving", "quarantined", "doomed", "uploading", "fetching", "engines", "waiting", "dirty")


class ChaosRun(Storm):
    """`run` once. See `Storm` for the arguments."""

    # ---- the whole

    def run(self) -> Outcome:
        began = time.monotonic()
        try:
            self.prepare()
            self.weather()
            self._calm()
            self._heal()
            self._finish()
        except Exception as error:
            self.problem(f"the run stopped: {type(error).__name__}: {error}")
        finally:
            self._end_all()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    # ---- calm, healing, the end

    def _calm(self) -> None:
        self.storming = False
        self.set_outage(False)
        if self.proxy is not None:
            self.proxy.clear()
        for lift in self.lifts:
            lift()
        for member in (*self.collectors, *self.spares):
            member.end()
        for node in list(self.others):
            self.end_other(node)
        for member in (*self.agents, *self.engines):
            self.wake(member)
        self.timers.clear()
        self.limited = False
        self.tend()
        for node, agent in enumerate(self.agents):
            if agent.alive:
                agent.tell("rates", {})
                self.outcome.notes["agents that lived through the storm"] += 1
            else:
                self.start_agent(node)
        if not self.turn(ROUND_S, lambda: not any(engine.alive for engine in self.engines)):
            self.problem("an engine did not end its round after the storm")
        for engine in self.engines:
            self.drain_pipe(engine)
            engine.end()
            engine.process = None
        for node, agent in enumerate(self.agents):
            if not self.turn(20.0, lambda agent=agent: bool(agent.ready)):  # type: ignore[misc]
                self.problem(f"agent {node} did not get ready")
        self._flush("after the storm")

    def report(self, node: int) -> dict[str, Any]:
        """What agent `node` says of itself."""
        self.reports.clear()
        for _ in range(10):  # it may just be ending, and another one be started
            self.agents[node].tell("report")
            if self.turn(2.0, lambda: bool(self.reports)):
                return self.reports.pop()
        raise RuntimeError(f"agent {node} gives no report")

    @contextmanager
    def _talking(self, node: int) -> Iterator[Connection]:
        connection: Connection | None = None
        for _ in range(100):  # a socket that vanished is back within a second or so
            with suppress(S3kvError):
                connection = Connection.open(self.settings(node).agent.socket, "cli", timeout_s=10.0)
                break
            self.turn(0.05)
        if connection is None:
            raise RuntimeError(f"agent {node} cannot be reached")
        try:
            yield connection
        finally:
            connection.close()

    def _flush(self, when: str, *allowed: str) -> None:
        """Drain every agent, wait until nothing is held any more, empty the tiers, let catalogs catch up."""
        for node in range(self.plan.agents):
            drained = self._drained(node)
            self.outcome.notes[f"blocks not stored {when.partition(' round')[0]}"] += drained.unsaved_blocks
            self._wait_quiet(node, when, *allowed)
            with self._talking(node) as talk:
                talk.call(Forget(talk.next_id(), ""), Done, timeout_s=10.0)
        for node in range(self.plan.agents):
            seen = self.report(node)["gauges"].get("polls", 0)
            self.turn(QUIET_S, lambda node=node, seen=seen: self._polled(node, seen))  # type: ignore[misc]

    def _drained(self, node: int) -> Drained:
        for _ in range(20):  # it may just be ending, and another one be started
            with suppress(AgentUnavailable), self._talking(node) as talk:
                return talk.call(Drain(talk.next_id(), 10.0), Drained, timeout_s=20.0)
            self.turn(0.05)
        raise RuntimeError(f"agent {node} does not drain")

    def _polled(self, node: int, seen: int) -> bool:
        polls = self.report(node)["gauges"].get("polls")
        return polls is None or polls >= seen + 2

    def _wait_quiet(self, node: int, when: str, *allowed: str) -> None:
        end = time.monotonic() + QUIET_S
        while True:
            gauges = self.report(node)["gauges"]
            held = {name: gauges[name] for name in HELD_GAUGES if gauges.get(name) and name not in allowed}
            if not held:
                return
            if time.monotonic() >= end:
                self.problem(f"{when}: agent {node} still holds {held}")
                return
            self.turn(0.05)

    def _heal(self) -> None:
        """Rounds of one fresh engine, on the last agent, until all that can be loaded is."""
        node = self.plan.agents - 1
        healer = Member()
        self.engines = [healer]
        with self._talking(node):
            pass  # an engine connects once at its start, then at its own pace
        arguments = (self.config(node, True), "healer", self.plan.sim, self.plan.requests, None, True)
        self.start(healer, processes.engine_main, *arguments, name="healer")
        block = SimConfig.from_json(self.plan.sim).tokens_per_block
        loadable = sum((len(request.prompt_tokens) - 1) // block * block for request in self.plan.requests)
        # V1 reports no pages of a window that has moved on, and saves only once reports have proved its block size:
        # there the hit rate that can be had is the one that does not rise any more, as without faults.
        settles = self.plan.sim["manager"] == "v1"
        loaded = -1
        for number in range(1, HEAL_ROUNDS + 1):
            before, loaded = loaded, self._one_round(healer)
            self._flush(f"healing round {number}", "engines")
            if loaded >= loadable or (settles and loaded == before):
                self.outcome.notes[f"healed by round {number}"] += 1
                self.outcome.notes["tokens loadable"] += loadable
                self.outcome.notes["tokens loaded when healed"] += loaded
                break
            healer.tell("again")
        else:
            self.problem(f"{loaded} of {loadable} tokens were loaded in healing round {HEAL_ROUNDS}")
        healer.tell("end")
        self.turn(ROUND_S, lambda: not healer.alive)
        healer.end()
        healer.process = None

    def _one_round(self, healer: Member) -> int:
        """Tokens loaded in this round."""
        loaded, over = [0], [False]
        heard = self.heard

        def listen(member: Member, what: str, *values: Any) -> None:
            if what == "round":
                over[0] = True
                return
            if what == "result":
                loaded[0] += values[1]["loaded_tokens"]
            heard(member, what, *values)

        self.heard = listen  # type: ignore[method-assign]
        try:
            self.turn(ROUND_S, lambda: over[0] or not healer.alive)
        finally:
            self.heard = heard  # type: ignore[method-assign]
        if not over[0]:
            raise RuntimeError("the healing engine did not end its round")
        return loaded[0]

    def _finish(self) -> None:
        from benchmarks.chaos_audit import audit

        for node in range(self.plan.agents):
            self._wait_quiet(node, "at the end")
            said = self.report(node)
            self.outcome.problems += [f"agent {node}: {text}" for text in said["problems"]]
            self.outcome.faults.update({f"store {name}": count for name, count in said["faults"].items()})
            self._compare_resources(node, said)
            (self.folder / f"metrics{node}.txt").write_text(said["metrics"])
        for agent in self.agents:
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
        for other in self.others.values():
            other.close()
        for member in (*self.engines, *self.agents, *self.spares, *self.collectors):
            member.end()

    def to_json(self) -> str:
        return json.dumps(vars(self.outcome), default=dict)
