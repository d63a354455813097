"""An engine: its ranks, its requests and its results.

As a command, `python -m s3kv.sim.engine JOB.json RESULT.json` runs a job in a process of its own. A job is
`{"config": {…SimConfig…}, "connector": {…ConnectorConfig…} or null, "requests": [{…SimRequest…}],
"sequential": true, "empty_device": false, "install": {"paths": "both", "early": false}}`; the result is
`{"results": […], "iterations": n}`.
A job that fails ends the process with a status other than 0 and one line on standard error.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from s3kv.sim.config import ConnectorConfig, SimConfig, SimRequest, SimResult
from s3kv.sim.driver import CallRecord
from s3kv.sim.errors import ContractError
from s3kv.sim.executor import Executor
from s3kv.sim.install import install
from s3kv.sim.ranks import Ranks, SoloRank, ThreadRanks, start_ranks

IDLE_PAUSE_S = 0.0005


class Engine:
    """Serves requests with one model, and with a connector if one is named.

    Raises at construction whatever the bring-up of a rank raises. An error that escapes a callback of the connector's
    escapes `step` too, and leaves the engine over: only `shutdown` may be called then.

    clock: seconds, for times to first token. idle: called when an iteration had nothing to do but wait for transfers.
    """

    def __init__(
        self,
        config: SimConfig,
        connector: ConnectorConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        idle: Callable[[], None] = lambda: time.sleep(IDLE_PAUSE_S),
    ) -> None:
        self.config, self.connector = config, connector
        self._idle, self.iterations, self._arrivals, self._stalled = idle, 0, 0, 0
        self._owner: dict[int, int] = {}
        self._is_idle, self._failed = True, False
        self._ranks: Ranks | None = start_ranks(config, connector, clock)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def executors(self) -> list[Executor]:
        """The ranks' executors, for tests to look into; only where ranks are not processes."""
        if isinstance(self._ranks, SoloRank):
            return [self._ranks.executor]
        if isinstance(self._ranks, ThreadRanks):
            return [executor for executor in self._ranks.executors if executor is not None]
        raise ContractError("the executors live in other processes")

    def trace(self, rank: int = 0) -> list[CallRecord]:
        """A rank's calls into the connector, in order, when the configuration says `trace`."""
        records: list[CallRecord] = self._call("trace")[rank] or []
        return records

    def submit(self, request: SimRequest) -> None:
        """Takes a request in. Ids are unique over the engine's life. Raises ValueError for one that is not."""
        if request.request_id in self._owner:
            raise ValueError(f"request {request.request_id} was submitted before")
        if not request.prompt_tokens or request.max_new_tokens < 1:
            raise ValueError(f"request {request.request_id} has no prompt or asks for no token")
        size = self.config.tp_size
        owner = self._arrivals % size if request.dp_rank is None else request.dp_rank
        self._arrivals, self._is_idle = self._arrivals + 1, False
        self._owner[request.request_id] = owner
        if self.config.attention_dp:
            self._on_owner("submit", owner, request)
        else:
            self._call("submit", request)

    def cancel(self, request_id: int) -> None:
        """Cancels a request as soon as that can be done; one that is over, or unknown, is left alone."""
        if request_id not in self._owner:
            return
        if self.config.attention_dp:
            self._on_owner("cancel", self._owner[request_id], request_id)
        else:
            self._call("cancel", request_id)

    def step(self) -> list[SimResult]:
        """One iteration on every rank. Returns the results of the requests that it ended."""
        answers = self._call("step")
        self.iterations += 1
        self._is_idle = all(idle for _, idle, _ in answers)
        self._stalled = 0 if any(progressed for _, _, progressed in answers) else self._stalled + 1
        if self.config.attention_dp:
            return [result for results, _, _ in answers for result in results]
        results: list[SimResult] = answers[0][0]
        return results

    def run_until_done(self) -> list[SimResult]:
        """Steps until no request is active and no pages are held.

        Raises ContractError after `stall_limit` iterations without progress: a transfer that is never reported done.
        """
        results = []
        while not self._is_idle:
            results += self.step()
            if self._stalled > self.config.stall_limit:
                raise ContractError(f"no progress in {self._stalled} iterations: a transfer is never reported complete")
            if self._stalled:
                self._idle()
        return results

    def reset_reuse(self) -> None:
        """Forgets what the device still holds of earlier requests, so that the next one finds it empty."""
        self._call("reset_reuse")

    def generate(
        self, requests: Iterable[SimRequest], *, sequential: bool = False, empty_device: bool = False
    ) -> list[SimResult]:
        """Serves requests, together or one after another, and returns their results in the order given.

        empty_device: each part starts with nothing reusable on the device.
        """
        requests, results = list(requests), []
        for part in [[request] for request in requests] if sequential else [requests]:
            for request in part:
                self.submit(request)
            results += self.run_until_done()
            if empty_device:
                self.reset_reuse()
        by_id = {result.request_id: result for result in results}
        return [by_id[request.request_id] for request in requests]

    def shutdown(self) -> None:
        """Ends the connector, where it has a `shutdown`, and the ranks. Idempotent."""
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        ranks.close(self._failed)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return self._call_each(method, [arguments] * self.config.tp_size)

    def _on_owner(self, method: str, owner: int, argument: Any) -> None:
        nobody: tuple[Any, ...] = ("", ())
        calls = [(method, (argument,)) if rank == owner else nobody for rank in range(self.config.tp_size)]
        self._call_each("dispatch", calls)

    def _call_each(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        if self._ranks is None or self._failed:
            raise ContractError("the engine is over")
        try:
            return self._ranks.call(method, arguments)
        except BaseException:
            self._failed = True
            raise


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a job given as JSON values; see the module's description."""
    how = job.get("install", {})
    connector = None if job.get("connector") is None else ConnectorConfig(**job["connector"])
    requests = [SimRequest.from_json(values) for values in job["requests"]]
    config = SimConfig.from_json(job.get("config", {}))
    with install(how.get("paths", "both"), how.get("early", False)), Engine(config, connector) as engine:
        results = engine.generate(
            requests, sequential=job.get("sequential", True), empty_device=job.get("empty_device", False)
        )
    return {"results": [result.to_json() for result in results], "iterations": engine.iterations}


def main(arguments: list[str]) -> int:
    """The command. Returns the exit status."""
    if len(arguments) != 2:
        print("usage: python -m s3kv.sim.engine JOB.json RESULT.json", file=sys.stderr)
        return 2
    try:
        result = run_job(json.loads(Path(arguments[0]).read_text()))
        Path(arguments[1]).write_text(json.dumps(result))
    except Exception as error:
        print(f"the engine stopped: {type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
