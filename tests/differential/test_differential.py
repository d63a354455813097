"""Every generated token equals the run without a connector, over the product of what the runtime can present.

Each case serves a random workload twice, on two engines in turn that share a tiny tier: the second finds what the first
stored, in the tier or in the bucket. Pages are watched (`guard`), freed pages hold NaN, and freed slots garbage, so a
wrong byte shows in the scores. At the end no lease, no pin and no request state is left, and every stored block is
named by a chain of tokens that were really computed.
"""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.connector_rig import CONNECTOR, again, assert_same, plain, serving, use_agent
from support.fake_agent import FakeAgent

from s3kv.connector.guard import PromiseBroken
from s3kv.identity import NamespaceSpec
from s3kv.sim import Engine, Media, ModelShape, OfferPolicy, ReplayPolicy, SimConfig, SimRequest, install
from s3kv.sim.workload import WorkloadShape, random_workload

SMALL = ModelShape(num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp=32, windows=(None,))
MODELS = {
    "full": SMALL,
    "four heads": dataclasses.replace(SMALL, num_kv_heads=4),
    "one window": dataclasses.replace(SMALL, windows=(48,)),
    "narrow window": dataclasses.replace(SMALL, windows=(None, 20)),
    "windows": dataclasses.replace(SMALL, windows=(None, 48)),
    "regions": dataclasses.replace(SMALL, num_layers=3, windows=(None, 48), wide_layers=(1,), block_scales=True),
    "replicated": dataclasses.replace(SMALL, num_layers=3, windows=(None, 48), index_dim=8),
    "latent": dataclasses.replace(SMALL, latent_layers=(0, 1), latent_dim=16),
}
V1_MODELS = ("full", "one window", "latent")


@dataclass(frozen=True)
class Setting:
    """One point of the product, and the agent it meets."""

    model: str = "full"
    engine: dict[str, Any] = field(default_factory=dict)
    policy: str = "wait"
    slots: int = 24
    fetch_polls: int = 0
    paths: str = "both"
    early: bool = False
    sequential: bool = False
    media: float = 0.15

    def config(self) -> SimConfig:
        return SimConfig(
            model=MODELS[self.model],
            model_name="s3kv-sim-media" if self.media else "s3kv-sim",
            num_pages=96,
            guard=True,
            adapters={1: "summary"},
            ranks="thread",
            **self.engine,
        )

    def agent(self) -> FakeAgent:
        return FakeAgent(self.slots, fetch_polls=self.fetch_polls)


SHAPE = WorkloadShape(
    requests=6, max_prompt=150, max_new_tokens=20, prefixes=2, salts=1, adapters=1, media=0.15, cancellations=0.15,
    priorities=True, vocabulary=200,
)  # fmt: skip

V2 = {"manager": "v2"}
V1 = {"manager": "v1"}  # offers little to a model that takes media: "v1, media"
CHUNKED = {"chunk_tokens": 48}
OVERLAP = {"overlap": True}
UNRULY = {"offers": OfferPolicy("random", ragged=True, late_match=True), "replays": ReplayPolicy(0.05)}

SETTINGS = {
    "v1": Setting(engine=V1, media=0.0),
    "v1, chunks, overlap": Setting(engine={**V1, **CHUNKED, **OVERLAP}, media=0.0),
    "v1, early release, old path": Setting(engine={**V1, **CHUNKED}, paths="old", early=True, media=0.0),
    "v1, no reuse": Setting(engine={**V1, "reuse": False}, media=0.0),
    "v1, latent": Setting("latent", engine=V1, media=0.0),
    "v1, parked": Setting(engine={**V1, **OVERLAP}, policy="park", fetch_polls=2, media=0.0),
    "v1, media": Setting(engine=V1, media=0.7, sequential=True, slots=64),
    "v2": Setting(engine=V2, paths="new"),
    "v2, whole blocks only": Setting(engine={**V2, "partial_reuse": False}),
    "v2, chunks": Setting(engine={**V2, **CHUNKED}),
    "v2, overlap": Setting(engine={**V2, **OVERLAP}),
    "v2, one window": Setting("one window", engine={**V2, **CHUNKED}),
    "v2, windows": Setting("windows", engine={**V2, **CHUNKED, **OVERLAP}),
    "v2, narrow window": Setting("narrow window", engine={**V2, **CHUNKED}, sequential=True),
    "v2, one after another": Setting(engine={**V2, **OVERLAP}, sequential=True, slots=64),
    "v2, windows, unruly": Setting("windows", engine={**V2, **CHUNKED, **OVERLAP, **UNRULY}),
    "v2, unruly": Setting(engine={**V2, **UNRULY}),
    "v2, regions, padding": Setting("regions", engine={**V2, "padding_bytes": 64}),
    "v2, regions, replicated absent": Setting("replicated", engine={**V2, **CHUNKED, "replicated": "absent"}),
    "v2, regions, replicated empty": Setting("replicated", engine={**V2, "replicated": "empty"}),
    "v2, regions, replicated": Setting("replicated", engine={**V2, **CHUNKED, "replicated": "used"}),
    "v2, latent": Setting("latent", engine=V2),
    "v2, resident": Setting(engine={**V2, **CHUNKED}, policy="resident"),
    "v2, parked": Setting("windows", engine={**V2, **CHUNKED}, policy="park", fetch_polls=2),
    "v2, parked, unruly": Setting(engine={**V2, **OVERLAP, **UNRULY}, policy="park", fetch_polls=3),
    "v2, parked, passes without requests": Setting(engine={**V2, "load_on_empty": True}, policy="park", fetch_polls=4),
    "v2, tiny tier": Setting(engine={**V2, **CHUNKED}, slots=3),
    "v2, dummies, no layer hooks": Setting(engine={**V2, "dummies": 3, "layer_hooks": "never"}),
    "v2, scheduler built first": Setting(engine={**V2, "scheduler_first": True}),
    "v2, worker built first": Setting(engine={**V2, "scheduler_first": False}),
    "v2, two ranks": Setting("windows", engine={**V2, **CHUNKED, "tp_size": 2}),
    "v2, two ranks, replicated": Setting("replicated", engine={**V2, "tp_size": 2}, slots=64),
    "v2, two ranks, latent": Setting("latent", engine={**V2, "tp_size": 2}),
    # Room for all blocks: in fewer slots the rank that is ahead drops what the other has not written yet.
    "v2, two ranks, parked": Setting(engine={**V2, **OVERLAP, "tp_size": 2}, policy="park", fetch_polls=3, slots=64),
    "v1, two ranks": Setting(engine={**V1, **CHUNKED, **OVERLAP, "tp_size": 2}, media=0.0),
    "v2, attention dp": Setting("windows", engine={**V2, **CHUNKED, "tp_size": 2, "attention_dp": True}),
}


def check(patch: pytest.MonkeyPatch, setting: Setting, seed: int) -> int:
    """Serve a workload on two engines in turn; returns how many tokens the second one loaded."""
    agent, config = setting.agent(), setting.config()
    use_agent(patch, agent, load__policy=setting.policy, identity__adapters=json.dumps({"1": "summary"}))
    first = random_workload(random.Random(seed), dataclasses.replace(SHAPE, media=setting.media))
    loaded = 0
    with install(setting.paths, setting.early):  # type: ignore[arg-type]
        for requests in (first, again(first)):
            expected = plain(config, requests)
            with serving(config) as engine:
                results = engine.generate(requests, sequential=setting.sequential)
            assert_same(expected, results)
            agent.check_at_rest()
            check_stored(agent, config, [*first, *again(first)])
            loaded = sum(result.loaded_tokens for result in results)
            agent.forget_tier()
    return loaded


def check_stored(agent: FakeAgent, config: SimConfig, requests: list[SimRequest]) -> None:
    """Every stored block follows its parent, and no chain is longer than what a request can have computed."""
    blocks = agent.blocks_saved()
    longest = max(len(each.prompt_tokens) + each.max_new_tokens for each in requests) // config.tokens_per_block
    for parent, ordinal in blocks.values():
        assert 0 <= ordinal < longest
        assert (parent == bytes(16)) == (ordinal == 0)
        if parent in blocks:
            assert blocks[parent][1] == ordinal - 1


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_a_run_without_a_connector(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = SETTINGS[name]
    loaded = [check(monkeypatch, setting, seed) for seed in (1, 2)]
    if setting.engine.get("reuse", True) and setting.slots > 8 and setting.policy != "resident":
        assert sum(loaded) > 0, "nothing was loaded, so nothing was tested"


@settings(max_examples=12)
@given(st.data())
def test_any_point_of_the_product(data: st.DataObject) -> None:
    manager = data.draw(st.sampled_from(["v1", "v2"]), "manager")
    model = data.draw(st.sampled_from(V1_MODELS if manager == "v1" else tuple(MODELS)), "model")
    engine: dict[str, Any] = {
        "manager": manager,
        "chunk_tokens": data.draw(st.sampled_from([None, 16, 48])),
        "overlap": data.draw(st.booleans()),
        "partial_reuse": data.draw(st.booleans()),
        "dummies": data.draw(st.sampled_from([0, 4])),
        "layer_hooks": data.draw(st.sampled_from(["always", "prefill", "never"])),
        "load_on_empty": data.draw(st.booleans()),
        "tp_size": data.draw(st.sampled_from([1, 1, 2])),
    }
    if manager == "v2":
        engine |= data.draw(st.sampled_from([{}, UNRULY]))
        engine["padding_bytes"] = data.draw(st.sampled_from([0, 32]))
        engine["replicated"] = data.draw(st.sampled_from(["absent", "empty", "used"]))
    setting = Setting(
        model,
        engine,
        policy=data.draw(st.sampled_from(["wait", "park", "resident"]), "policy"),
        slots=data.draw(st.sampled_from([4, 24, 64]), "slots"),
        fetch_polls=data.draw(st.sampled_from([0, 3]), "polls"),
        media=data.draw(st.sampled_from([0.0, 0.4]), "media"),
    )
    with pytest.MonkeyPatch.context() as patch:
        check(patch, setting, data.draw(st.integers(0, 1000), "seed"))


def test_case_04_what_one_rank_saved_is_a_hit_on_another_under_attention_dp(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = FakeAgent(64)
    use_agent(monkeypatch, agent)
    config = SimConfig(model=SMALL, tp_size=2, attention_dp=True, ranks="thread", guard=True)
    prompt = tuple(range(100))
    with install(), serving(config) as engine:
        cold = engine.generate([SimRequest(1, prompt, dp_rank=0)])
        for executor in engine.executors:
            assert executor.driver.worker.transfers.drain(10)
        warm = engine.generate([SimRequest(2, prompt, dp_rank=1)])
    assert (cold[0].loaded_tokens, warm[0].loaded_tokens) == (0, 96)
    assert warm[0].tokens == cold[0].tokens
    assert {type(each.namespace) for each in agent.clients} == {NamespaceSpec}
    assert len({each.namespace.digest for each in agent.clients}) == 1


@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_servers_of_one_checkpoint_with_other_windows_share_nothing(
    manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent(64)
    use_agent(monkeypatch, agent)
    first = SimRequest(1, tuple(random.Random(3).choices(range(200), k=130)), max_new_tokens=6)
    second = dataclasses.replace(first, request_id=2)
    windowed, full = (
        dataclasses.replace(Setting(model, {"manager": manager, **CHUNKED}).config(), adapters={})
        for model in ("one window", "full")
    )
    with install():
        with serving(windowed) as engine:
            engine.generate([first])
        assert agent.blocks_saved()
        expected = plain(full, [second])
        with serving(full) as engine:
            results = engine.generate([second])
    assert results[0].loaded_tokens == 0
    assert_same(expected, results)


PICTURES = [
    SimRequest(number, tuple(range(100)), max_new_tokens=4, media=media)
    for number, media in enumerate([(Media(8, 60, "a cat"),), (), (Media(8, 60, "a dog"),), (Media(8, 60, "a cat"),)])
]


def check_pictures(patch: pytest.MonkeyPatch, manager: str, hashed: bool) -> list[int]:
    """One row of tokens, as placeholders are, and different pictures behind them. Returns what each loaded."""
    agent = FakeAgent(64)
    use_agent(patch, agent)
    config = Setting(engine={"manager": manager}).config()
    requests = [dataclasses.replace(each, media_hashes=hashed) for each in PICTURES]
    results = []
    with install():
        expected = plain(config, requests, sequential=True, empty_device=True)
        with serving(config) as engine:
            for request in requests:
                results += engine.generate([request], empty_device=True)
                assert engine.executors[0].driver.worker.transfers.drain(10)
    assert_same(expected, results)
    return [result.loaded_tokens for result in results]


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("manager", ["v1", "v2"])
def test_media_without_hashes_are_no_text(manager: str, hashed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_pictures(monkeypatch, manager, hashed) == ([0, 0, 0, 96] if hashed else [0] * 4)


def test_plain_requests_are_served_under_v1_where_the_checkpoint_is_for_text(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = {}
    for media in (0.0, 0.5):
        agent = FakeAgent(64)
        use_agent(monkeypatch, agent)
        config = Setting(engine=V1, media=media).config()
        with install():
            for number in (1, 2):
                with serving(config) as engine:
                    (result,) = engine.generate([SimRequest(number, tuple(range(100)), max_new_tokens=4)])
        assert agent.blocks_saved()
        loaded[media] = result.loaded_tokens
    assert loaded == {0.0: 96, 0.5: 0}


def test_a_text_model_with_media_all_the_same_is_stopped_before_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Media that no file of the checkpoint speaks of: once seen, nothing more is offered; after an offer, the end."""
    use_agent(monkeypatch, FakeAgent(64))
    config = Setting(engine=V1, media=0.0).config()
    text, picture = PICTURES[1], dataclasses.replace(PICTURES[0], media_hashes=False)
    with install():
        with serving(config) as engine:
            engine.generate([picture], empty_device=True)
            for request in (text, dataclasses.replace(text, request_id=10)):
                assert engine.generate([request], empty_device=True)[0].loaded_tokens == 0
        with Engine(config, CONNECTOR) as engine, pytest.raises(PromiseBroken, match="use_kv_cache_manager_v2"):
            engine.generate([dataclasses.replace(picture, request_id=20)])
