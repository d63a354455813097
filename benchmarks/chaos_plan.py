"""What one chaos run does, as a function of its seed alone: pure, so that a failing seed can be looked at and repeated.

What the plan fixes is the workload, the settings, the faults and when they begin. How far each process is by then is
the machine's doing; a seed that failed is therefore run a few times when it is looked into.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from s3kv.sim.config import SimRequest
from s3kv.sim.workload import WorkloadShape, random_workload
from s3kv.store.faults import Fault

StoreKind = Literal["file", "s3"]

ACTIONS: dict[str, int] = {
    "agent_kill": 5,
    "agent_stop": 4,
    "agent_term": 2,
    "agent_race": 2,
    "other_version": 1,
    "engine_kill": 4,
    "engine_stop": 3,
    "rank_kill": 2,
    "rank_stop": 2,
    "outage": 4,
    "unlink_socket": 2,
    "delete_object": 4,
    "flip_object": 3,
    "cut_object": 2,
    "wipe_index": 2,
    "garbage_client": 2,
    "lying_client": 2,
    "mute_client": 2,
    "collect": 4,
    "compact": 3,
    "merge": 2,
    "collector_kill": 2,
    "collector_stop": 1,
    "descriptors": 2,
    "disk_full": 2,
}
"""Everything that happens to processes and to the bucket behind their backs, with how likely each is."""

STEPS: tuple[tuple[str, str], ...] = (
    ("put", "chunk"),
    ("put", "log"),
    ("put", "snap"),
    ("put", "namespace"),
    ("get", "chunk"),
    ("get", "log"),
    ("head", "chunk"),
    ("list", "log"),
)
"""Steps of an agent in the store, at which it may die: upload, publish, compact, open, load."""

COLLECTOR_STEPS: tuple[tuple[str, str], ...] = (("put", "lease"), ("put", "log"), ("delete", "chunk"), ("put", "snap"))
CLIENT_STEPS: tuple[str, ...] = ("match", "reserve", "commit", "release", "finished")

MODELS: dict[str, dict[str, Any]] = {
    "full": {"num_layers": 2, "hidden": 32, "num_heads": 2, "num_kv_heads": 1, "mlp": 32, "windows": (None,)},
    "window": {"num_layers": 2, "hidden": 32, "num_heads": 2, "num_kv_heads": 1, "mlp": 32, "windows": (None, 40)},
    "latent": {"num_layers": 2, "hidden": 32, "num_heads": 2, "windows": (None,), "mlp": 32, "latent_layers": (0, 1)},
    "ranks": {"num_layers": 2, "hidden": 32, "mlp": 32, "windows": (None, 40), "index_dim": 4},
}


@dataclass(frozen=True, slots=True)
class Action:
    """At `at_s` of the storm `kind` happens to agent or engine number `target`; `value` is seconds or a fraction."""

    at_s: float
    kind: str
    target: int
    value: float


@dataclass(frozen=True, slots=True)
class Death:
    """The process sends itself `signal` at its `nth` call of this step, before or after it is carried out."""

    operation: str
    kind: str
    nth: int
    after: bool
    stop: bool


@dataclass(frozen=True)
class ChaosPlan:
    seed: int
    store: StoreKind
    agents: int
    engines: tuple[int, ...]
    """For each engine the number of its agent."""
    sim: dict[str, Any]
    requests: tuple[SimRequest, ...]
    sections: dict[str, dict[str, Any]]
    """Settings by section, the same for all processes; sockets and the store's address come from the run."""
    storm_s: float
    rates: dict[str, float]
    """Faults of calls to the store, drawn in the agent (a file store)."""
    http_rate: float
    """Share of requests that the proxy harms (an S3 store)."""
    actions: tuple[Action, ...]
    agent_deaths: tuple[Death, ...] = ()
    engine_deaths: tuple[Death, ...] = ()
    collector_deaths: tuple[Death, ...] = ()
    salts: tuple[str, ...] = field(default=())

    def without_faults(self) -> ChaosPlan:
        """The same workload in fair weather: what a failing seed is compared with."""
        return replace(
            self, rates={}, http_rate=0.0, actions=(), agent_deaths=(), engine_deaths=(), collector_deaths=()
        )


def make_plan(seed: int, store: StoreKind) -> ChaosPlan:
    rng = random.Random(f"chaos {seed}")
    salts = tuple(f"raw-salt-{rng.getrandbits(64):016x}" for _ in range(2))
    sim = _sim(rng)
    agents = rng.choice((1, 1, 2))
    engines = tuple(index % agents for index in range(max(agents, rng.choice((1, 1, 2)))))
    if sim.get("tp_size", 1) > 1:
        agents, engines = 1, (0,)
    storm_s = rng.uniform(0.6, 1.4)
    return ChaosPlan(
        seed=seed,
        store=store,
        agents=agents,
        engines=engines,
        sim=sim,
        requests=_requests(rng, salts, sim),
        sections=_sections(rng),
        storm_s=storm_s,
        rates=_rates(rng) if store == "file" else {},
        http_rate=rng.choice((0.05, 0.15, 0.4)),
        actions=_actions(rng, storm_s, agents, len(engines), sim),
        agent_deaths=_deaths(rng, STEPS, agents, 0.5),
        engine_deaths=_deaths(rng, tuple((step, "") for step in CLIENT_STEPS), len(engines), 0.4),
        collector_deaths=_deaths(rng, COLLECTOR_STEPS, 1, 0.5),
        salts=salts,
    )


def _sim(rng: random.Random) -> dict[str, Any]:
    model = rng.choices(("full", "window", "latent", "ranks"), (4, 4, 2, 1))[0]
    sim: dict[str, Any] = {
        "model": MODELS[model],
        "num_pages": rng.choice((64, 128)),
        "manager": rng.choice(("v1", "v2", "v2")) if model in ("full", "window") else "v2",
        "overlap": rng.random() < 0.5,
        "chunk_tokens": rng.choice((None, 32, 48)),
    }
    if model == "ranks":
        sim |= {"tp_size": 2, "ranks": "process"}
    return sim


def _requests(rng: random.Random, salts: tuple[str, ...], sim: dict[str, Any]) -> tuple[SimRequest, ...]:
    few = sim.get("tp_size", 1) > 1
    shape = WorkloadShape(
        requests=4 if few else rng.randint(5, 8),
        max_prompt=rng.choice((80, 150)),
        max_new_tokens=rng.choice((3, 18)),
        boundaries=(16, 32, 64),
        prefixes=2,
        salts=len(salts),
        adapters=1,
    )
    named = {f"salt {number}": salt for number, salt in enumerate(salts)}
    made = random_workload(rng, shape)
    fields = ("request_id", "prompt_tokens", "max_new_tokens", "lora_task_id")
    return tuple(
        SimRequest(**{name: getattr(one, name) for name in fields}, cache_salt=named.get(one.cache_salt or ""))
        for one in made
    )


def _sections(rng: random.Random) -> dict[str, dict[str, Any]]:
    return {
        "store": {
            "request_timeout_s": 0.6,
            "connect_timeout_s": 0.5,
            "retries": rng.choice((0, 2)),
            "backoff_initial_s": 0.01,
            "backoff_max_s": 0.05,
            "breaker_failures": rng.choice((3, 8)),
            "breaker_reset_s": 0.15,
            "max_connections": rng.choice((4, 32)),
        },
        "tier": {"capacity_bytes": rng.choice((256 << 10, 1 << 20, 8 << 20)), "dirty_max_fraction": 0.8},
        "load": {
            "policy": rng.choice(("wait", "wait", "wait", "resident", "park")),
            "wait_ms_per_1k_tokens": 10_000.0,
            "wait_cap_ms": rng.choice((0.0, 50.0, 200.0)),
        },
        "upload": {
            "chunk_target_bytes": rng.choice((4096, 32 << 10, 1 << 20)),
            "seal_age_s": rng.choice((0.02, 0.2)),
            "seal_grace_s": 0.01,
            "give_up_s": rng.choice((0.3, 3.0)),
            "codec": rng.choice(("raw", "zstd", "auto")),
            "concurrency": rng.choice((1, 4)),
            "threads": 2,
        },
        "fetch": {"concurrency": rng.choice((1, 4)), "deadline_s": 0.8},
        "catalog": {
            "poll_interval_s": 0.05,
            "publish_interval_s": rng.choice((0.005, 0.05)),
            "poll_overlap_s": 5.0,
            "compact_after_segments": rng.choice((4, 256)),
            "map_bytes": 1 << 24,
        },
        "agent": {
            "autostart": False,
            "start_timeout_s": 2.0,
            "call_timeout_s": 0.1,
            "reconnect_s": 0.02,
            "drain_s": rng.choice((0.1, 2.0)),
            "log_level": "debug",
        },
        "collect": {"grace_s": 0.1, "lease_s": 0.5, "orphan_age_s": 3600.0},
    }


def _rates(rng: random.Random) -> dict[str, float]:
    chosen = rng.sample(list(Fault), rng.randint(1, 5))
    return {fault.value: rng.choice((0.02, 0.1, 0.3)) / len(chosen) ** 0.5 for fault in chosen}


def _actions(rng: random.Random, storm_s: float, agents: int, engines: int, sim: dict[str, Any]) -> tuple[Action, ...]:
    kinds = [kind for kind in ACTIONS if sim.get("tp_size", 1) > 1 or not kind.startswith("rank_")]
    weights = [ACTIONS[kind] for kind in kinds]
    actions = []
    for _ in range(rng.randint(2, 6)):
        kind = rng.choices(kinds, weights)[0]
        target = rng.randrange(engines if kind.startswith(("engine_", "rank_")) else agents)
        actions.append(Action(rng.uniform(0.0, storm_s), kind, target, rng.uniform(0.05, 0.5)))
    return tuple(sorted(actions, key=lambda action: action.at_s))


def _deaths(rng: random.Random, steps: tuple[tuple[str, str], ...], count: int, rate: float) -> tuple[Death, ...]:
    """For each of `count` processes one death, or one that never comes."""
    deaths = []
    for _ in range(count):
        operation, kind = rng.choice(steps)
        nth = rng.randint(1, 6) if rng.random() < rate else 1 << 30
        deaths.append(Death(operation, kind, nth, rng.random() < 0.5, rng.random() < 0.25))
    return tuple(deaths)
