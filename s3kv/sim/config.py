"""The settings of a simulated engine, its requests and its results. All of them are plain values, and picklable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from s3kv.sim.managers import CacheShape, Replicated
from s3kv.sim.model import Media
from s3kv.sim.policy import OfferPolicy, ReplayPolicy
from s3kv.sim.shape import ModelShape

Hooks = Literal["always", "prefill", "never"]


@dataclass(frozen=True)
class ConnectorConfig:
    """Names the connector's classes, as `kv_connector_config` does in TensorRT-LLM."""

    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str


@dataclass(frozen=True)
class SimConfig:
    """One engine.

    model_name: the default has a checkpoint folder that tells of a model for text alone; a connector finds none for
    other names. Requests may have media all the same, so name another model where that would be a lie.
    threads: torch's threads of a rank on the CPU; a setting of the process. More than the idle cores is far slower.
    manager: "v1" or "v2" (see `s3kv.sim.managers`).
    chunk_tokens: prompt tokens a pass computes of one request, at least a block; None turns chunked prefill off.
    max_num_tokens, max_batch_size: what one pass computes at most, and of how many requests.
    overlap: the overlap scheduler; results lag one iteration.
    reuse, partial_reuse: reuse of blocks that are on the device, whole and within a block.
    offers, replays: what the runtime decides against the connector (V2).
    layer_hooks: when `wait_for_layer_load` and `save_kv_layer` are called; "never" is a replayed CUDA graph.
    load_on_empty: whether `start_load_kv` and `wait_for_save` also run when all the batch is parked.
    dummies: dummy requests that the connector sees, one for every so many iterations; 0 for none. Under attention DP
    an idle rank runs dummies that the connector must not see.
    guard: watch for writes to pages that no offer covers, and for promised pages that were not written. Costs a copy
    of the cache in every iteration.
    scheduler_first: build the leader's scheduler before its worker (True), after (False), or both at once (None).
    runtime_checks: the runtime's own refusals at bring-up; off, so that a connector's own are seen.
    adapters: adapter identity by `lora_task_id`; a number without one names itself.
    llm_args: what a connector sees in its arguments, by dotted name, where it shall differ from this configuration.
    ranks: "process" runs the ranks of tensor parallelism as processes, "thread" as threads of this one.
    stall_limit: iterations in a row without progress after which the engine gives up.
    """

    model: ModelShape = field(default_factory=ModelShape)
    model_name: str = "s3kv-sim"
    kv_dtype: str = "float32"
    compute_dtype: str = "float64"
    device: str = "cpu"
    threads: int = 1
    seed: int = 0
    manager: Literal["v1", "v2"] = "v2"
    tokens_per_block: int = 16
    num_pages: int = 512
    padding_bytes: int = 0
    replicated: Replicated = "used"
    poison: Literal["nan", "garbage", "none"] = "nan"
    max_num_tokens: int = 8192
    max_batch_size: int = 16
    chunk_tokens: int | None = None
    overlap: bool = False
    reuse: bool = True
    partial_reuse: bool = True
    tp_size: int = 1
    attention_dp: bool = False
    ranks: Literal["process", "thread"] = "process"
    offers: OfferPolicy = field(default_factory=OfferPolicy)
    replays: ReplayPolicy = field(default_factory=ReplayPolicy)
    layer_hooks: Hooks = "always"
    load_on_empty: bool = False
    dummies: int = 0
    guard: bool = False
    trace: bool = False
    scheduler_first: bool | None = None
    runtime_checks: bool = True
    adapters: Mapping[int, str] = field(default_factory=dict)
    llm_args: Mapping[str, Any] = field(default_factory=dict)
    stall_limit: int = 20_000

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None and self.chunk_tokens < self.tokens_per_block:
            raise ValueError(f"chunk_tokens {self.chunk_tokens} is below tokens_per_block {self.tokens_per_block}")
        if self.replays.rate and self.manager == "v1":
            raise ValueError('replays need manager="v2"')

    @property
    def cache_shape(self) -> CacheShape:
        """The cache of one rank. Under attention DP a rank's cache is unsharded."""
        return CacheShape(
            model=self.model,
            kv_dtype=self.kv_dtype,
            tokens_per_block=self.tokens_per_block,
            num_pages=self.num_pages,
            padding_bytes=self.padding_bytes,
            replicated=self.replicated,
            poison=self.poison,
            tp_size=1 if self.attention_dp else self.tp_size,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SimConfig:
        """Builds a configuration from JSON. Raises TypeError for an unknown name."""
        parts: dict[str, Any] = dict(values)
        kinds: dict[str, Any] = {"model": ModelShape, "offers": OfferPolicy, "replays": ReplayPolicy}
        for name, kind in kinds.items():
            if name in parts:
                fields = {key: tuple(v) if isinstance(v, list) else v for key, v in parts[name].items()}
                parts[name] = kind(**fields)
        if "adapters" in parts:
            parts["adapters"] = {int(key): value for key, value in parts["adapters"].items()}
        return cls(**parts)


@dataclass(frozen=True)
class SimRequest:
    """One request.

    media: content that stands in for the tokens it covers. media_hashes: whether the runtime knows its digests.
    priority: retention priority (V1 reports it for every block). dp_rank: the rank that serves it under attention DP;
    None chooses by arrival. cancel_after: cancelled when it has been in the engine for so many iterations.
    """

    request_id: int
    prompt_tokens: tuple[int, ...]
    max_new_tokens: int = 16
    cache_salt: str | None = None
    lora_task_id: int | None = None
    media: tuple[Media, ...] = ()
    media_hashes: bool = True
    priority: int | None = None
    dp_rank: int | None = None
    cancel_after: int | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SimRequest:
        """Builds a request from JSON. Raises TypeError for an unknown name."""
        parts: dict[str, Any] = dict(values)
        parts["prompt_tokens"] = tuple(parts["prompt_tokens"])
        parts["media"] = tuple(Media(**item) for item in parts.get("media", ()))
        return cls(**parts)


@dataclass(frozen=True)
class SimResult:
    """What became of a request.

    tokens: the generated ones. loaded_tokens: prompt tokens honoured from the connector; reused_tokens: found on the
    device; computed_tokens: the rest of the prompt. A replay adds its own. top_scores: the winning score of every
    generated token, far more telling than the tokens. ttft_s: seconds from submission to the first token.
    error: None, "cancelled", or why the request could not run.
    """

    request_id: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    loaded_tokens: int
    reused_tokens: int
    computed_tokens: int
    ttft_s: float | None
    error: str | None = None
    top_scores: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return dataclasses.asdict(self)
