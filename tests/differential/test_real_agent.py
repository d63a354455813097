"""The same through the real agent, its socket and its store: two lives of engine and agent over one bucket."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.agents import RunningAgent, agent_settings, running_agent
from support.connector_rig import again, assert_same, plain, serving

from s3kv.settings import CONFIG_VARIABLE, Settings
from s3kv.sim import Engine, SimRequest, SimResult, install
from s3kv.sim.demo import write_settings
from s3kv.sim.workload import random_workload

from .test_differential import CHUNKED, OVERLAP, SHAPE, UNRULY, V1, V2, Setting

PLAIN_SHAPE = dataclasses.replace(SHAPE, cancellations=0.0, requests=5)

SETTINGS = {
    "v1": Setting(engine={**V1, **CHUNKED, **OVERLAP}, media=0.0),
    "v2": Setting(engine=V2),
    "v2, windows, unruly": Setting("windows", engine={**V2, **CHUNKED, **OVERLAP, **UNRULY}),
    "v2, parked": Setting("windows", engine={**V2, **CHUNKED}, policy="park"),
    "v2, tiny tier": Setting(engine=V2, slots=20),
    "v2, two ranks, replicated": Setting("replicated", engine={**V2, "tp_size": 2}),
    "v2, two ranks, latent": Setting("latent", engine={**V2, "tp_size": 2}),
    "v2, two ranks, parked": Setting(engine={**V2, **OVERLAP, "tp_size": 2}, policy="park"),
    "v2, attention dp": Setting(engine={**V2, "tp_size": 2, "attention_dp": True}),
}


def settings_for(folder: Path, setting: Setting, patch: pytest.MonkeyPatch) -> Settings:
    settings = agent_settings(
        folder,
        tier={"capacity_bytes": setting.slots * 4096 * 8},
        load={"policy": setting.policy, "max_pinned_fraction": 1.0},
        identity={"fingerprint": "simulated weights", "adapters": {"1": "summary"}},
    )
    write_settings(settings, folder / "s3kv.yaml")
    patch.setenv(CONFIG_VARIABLE, str(folder / "s3kv.yaml"))
    return settings


def at_rest(agent: RunningAgent) -> None:
    """No pin, promise or reservation is left, and the directory's books are right."""
    assert agent.agent is not None and agent.agent.node is not None
    for namespace in agent.agent.node.namespaces.values():
        agent.call(namespace.directory.check)
        status = agent.call(namespace.status)
        assert status["promises"] == 0
        assert status["tier"]["pinned"] == 0, json.dumps(status)


def open_catalogs(agent: RunningAgent) -> None:
    """A catalog opens in the background; until then nothing is known to be stored."""
    assert agent.agent is not None and agent.agent.node is not None
    for namespace in agent.agent.node.namespaces.values():
        agent.call(namespace.catalog_open.wait)


def flush(agent: RunningAgent) -> None:
    assert agent.agent is not None and agent.agent.node is not None
    agent.drain(20.0)


def life(settings: Settings, work: Callable[[RunningAgent], list[SimResult]]) -> list[SimResult]:
    with running_agent(settings) as agent:
        results = work(agent)
        flush(agent)
        at_rest(agent)
        return results


@pytest.mark.parametrize("name", SETTINGS)
def test_two_lives_over_one_bucket(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = SETTINGS[name]
    settings = settings_for(tmp_path, setting, monkeypatch)
    config = setting.config()
    first = random_workload(random.Random(7), dataclasses.replace(PLAIN_SHAPE, media=setting.media))
    loaded = 0
    with install():
        for requests in (first, again(first)):
            expected = plain(config, requests)

            def work(agent: RunningAgent, requests: list[SimRequest] = requests) -> list[SimResult]:
                with serving(config) as engine:
                    open_catalogs(agent)
                    return engine.generate(requests)

            results = life(settings, work)
            assert_same(expected, results)
            loaded = sum(result.loaded_tokens for result in results)
    assert loaded > 0


CORRUPTIONS: dict[str, Callable[[Path], Any]] = {
    "gone": lambda path: path.unlink(),
    "flipped": lambda path: path.write_bytes(bytes([*path.read_bytes()[:-1], path.read_bytes()[-1] ^ 1])),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "empty": lambda path: path.write_bytes(b""),
    "another": lambda path: path.write_bytes(b"<html>500</html>"),
    "forged (case 17)": lambda path: path.write_bytes((path.parent / "g0").read_bytes()),
}


@pytest.mark.parametrize("policy", ["wait", "park"])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_case_20_and_21_broken_objects_are_never_offered(
    name: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog says yes; one group's objects are gone or wrong: the prompt is computed, and the tokens are right."""
    setting = Setting("windows", engine={**V2, **CHUNKED}, policy=policy)
    settings = settings_for(tmp_path, setting, monkeypatch)
    config = setting.config()
    request = SimRequest(1, tuple(random.Random(3).choices(range(200), k=130)), max_new_tokens=4)
    with install():
        expected = plain(config, [request])

        def serve_once(agent: RunningAgent) -> list[SimResult]:
            with serving_but_maybe_held(config, policy) as engine:
                open_catalogs(agent)
                return generate(engine, request, policy)

        assert_same(expected, life(settings, serve_once))
        objects = [path for path in (tmp_path / "store").rglob("g1") if path.is_file()]
        assert objects
        for path in objects:
            CORRUPTIONS[name](path)
        with running_agent(settings) as agent:
            results = serve_once(agent)
        if results:
            assert_same(expected, results)
            assert results[0].loaded_tokens == 0


def serving_but_maybe_held(config: Any, policy: str) -> Any:
    """Under park, a request whose fetch failed is held for good: the engine is then ended as it is."""
    from support.connector_rig import CONNECTOR

    return serving(config) if policy == "wait" else Engine(config, CONNECTOR)


def generate(engine: Engine, request: SimRequest, policy: str) -> list[SimResult]:
    if policy == "wait":
        return engine.generate([request])
    engine.submit(request)
    for _ in range(300):
        results = engine.step()
        if results:
            return results
        for executor in engine.executors:
            executor.driver.worker.transfers.drain(1.0)
    return []


def test_an_agent_lost_and_found_under_a_running_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine serves without it, and loads again from the next one."""
    monkeypatch.setenv("S3KV_AGENT__RECONNECT_S", "0.01")
    setting = Setting(engine=V2)
    settings = settings_for(tmp_path, setting, monkeypatch)
    config = setting.config()
    prompts = [tuple(random.Random(seed).choices(range(200), k=100)) for seed in range(3)]
    requests = [SimRequest(number, prompts[number % 3], max_new_tokens=4) for number in range(9)]
    with install():
        expected = plain(config, requests, sequential=True, empty_device=True)
        agent = RunningAgent(settings)
        with serving(config) as engine:
            got = engine.generate(requests[:3], sequential=True, empty_device=True)
            flush(agent)
            agent.stop(0.0)
            got += engine.generate(requests[3:6], sequential=True, empty_device=True)
            with running_agent(settings) as agent:
                for executor in engine.executors:
                    wait_until_attached(executor.driver.worker)
                got += engine.generate(requests[6:], sequential=True, empty_device=True)
    assert_same(expected, got)
    assert [sum(each.loaded_tokens for each in got[i : i + 3]) for i in (0, 3, 6)] == [0, 0, 3 * 96]


def wait_until_attached(worker: Any) -> None:
    for _ in range(500):
        if worker.transfers.client.epoch:
            return
        worker.transfers.client.connect()
    raise AssertionError("the worker did not find the new agent")


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_are_processes_of_their_own(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor parallelism with broadcast and allgather between processes; both lives over one bucket."""
    from support.connector_rig import CONNECTOR

    setting = Setting("four heads", engine={**V2, **CHUNKED, "tp_size": ranks})
    settings = settings_for(tmp_path, dataclasses.replace(setting, slots=64), monkeypatch)
    config = dataclasses.replace(setting.config(), ranks="process")
    first = random_workload(random.Random(7), PLAIN_SHAPE)
    with install():
        for requests in (first, again(first)):
            expected = plain(dataclasses.replace(config, ranks="thread"), requests)

            def work(agent: RunningAgent, requests: list[SimRequest] = requests) -> list[SimResult]:
                with Engine(config, CONNECTOR) as engine:
                    open_catalogs(agent)
                    return engine.generate(requests)

            results = life(settings, work)
            assert_same(expected, results)
    assert sum(result.loaded_tokens for result in results) > 0
