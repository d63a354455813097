"""What may happen to a chaos run's processes, sockets and bucket: one method for each kind of action of its plan."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.faulty_proxy import FaultyProxy

from benchmarks import chaos_harm as harm
from benchmarks import chaos_processes as processes
from benchmarks.chaos_member import Member, Outcome
from benchmarks.chaos_plan import Action, ChaosPlan
from s3kv.errors import S3kvError
from s3kv.settings import Settings, StoreSettings
from s3kv.store.opening import open_unguarded


class Actions:
    """The harm that a run does; `ChaosRun` brings what it does harm to. False: it did not come to it."""

    plan: ChaosPlan
    folder: Path
    rng: random.Random
    outcome: Outcome
    direct: StoreSettings
    bucket: harm.BucketHarm
    proxy: FaultyProxy | None
    agents: list[Member]
    engines: list[Member]
    collectors: list[Member]
    spares: list[Member]
    others: dict[int, harm.OtherVersion]
    lifts: list[Callable[[], None]]
    limited: bool

    def settings(self, node: int) -> Settings:
        raise NotImplementedError

    def later(self, delay_s: float, work: Callable[[], object]) -> None:
        raise NotImplementedError

    def wake(self, member: Member) -> None:
        raise NotImplementedError

    def start(self, member: Member, target: Callable[..., None], *arguments: Any, name: str) -> None:
        raise NotImplementedError

    def start_agent(self, node: int) -> None:
        raise NotImplementedError

    def start_collector(self, how: str) -> Member:
        raise NotImplementedError

    def act(self, action: Action) -> None:
        done = getattr(self, f"_do_{action.kind}")(action)
        if done is not False:
            self.outcome.faults[action.kind] += 1

    def _pause(self, member: Member, seconds: float) -> bool:
        if member.stopping or not member.signal(signal.SIGSTOP):
            return False
        member.stopping = True
        self.later(seconds, lambda: self.wake(member))
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
            self.start(spare, processes.agent_main, *arguments, name="spare")
            self.spares.append(spare)

    def _do_other_version(self, action: Action) -> None:
        node = action.target
        if node not in self.others:
            self.agents[node].signal(signal.SIGKILL)
            self.others[node] = harm.OtherVersion(self.settings(node).agent.socket)
            self.later(action.value, lambda: self.end_other(node))

    def end_other(self, node: int) -> None:
        if (other := self.others.pop(node, None)) is not None:
            other.close()
        if not self.agents[node].alive:
            self.start_agent(node)

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
        self.later(0.2, lambda: engine.signal(signal.SIGKILL))
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
        self.lifts.append(wake)
        return True

    def _do_outage(self, action: Action) -> None:
        self.set_outage(True)
        self.later(action.value, lambda: self.set_outage(False))

    def set_outage(self, on: bool) -> None:
        if self.proxy is not None:
            self.proxy.outage = on
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
        self.start_collector("collect")

    def _do_compact(self, action: Action) -> None:
        self.start_collector("compact")

    def _do_merge(self, action: Action) -> None:
        self.start_collector("merge")

    def _do_collector_kill(self, action: Action) -> None:
        collector = self.start_collector("collect")
        self.later(action.value / 2, lambda: collector.signal(signal.SIGKILL))

    def _do_collector_stop(self, action: Action) -> None:
        collector = self.start_collector("collect")
        self.later(action.value / 4, lambda: self._pause(collector, action.value))

    def _limit(self, action: Action, squeeze: Callable[[int], Callable[[], None]]) -> bool:
        agent = self.agents[action.target]
        if not agent.alive or self.limited:
            return False
        lift = squeeze(agent.process.pid)
        self.limited = True

        def lift_once() -> None:
            lift()
            self.limited = False

        self.lifts.append(lift)
        self.later(action.value, lift_once)
        return True

    def _do_descriptors(self, action: Action) -> bool:
        return self._limit(action, harm.squeeze_descriptors)

    def _do_disk_full(self, action: Action) -> bool:
        return self._limit(action, harm.fill_disk)
