"""A request inside the executor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from s3kv.sim.config import SimConfig, SimRequest, SimResult
from s3kv.sim.llm_request import LlmRequest, LlmRequestState
from s3kv.sim.model import Identity
from s3kv.sim.reuse import BlockKey


@dataclass(eq=False)
class Active:
    """A request's state.

    position: tokens whose keys and values are computed, enqueued to be, or loaded; the next pass starts here.
    load_range: the tokens that a connector may write, from its offer on until the next pass is over.
    """

    spec: SimRequest
    request: LlmRequest
    identity: Identity
    scope: object | None
    arrived: float
    position: int = 0
    allocated: bool = False
    allocations: int = 0
    done: bool = False
    steps: int = 0
    reused: int = 0
    loaded: int = 0
    computed: int = 0
    first_token_at: float | None = None
    last_token: torch.Tensor | None = None
    scores: list[float] = field(default_factory=list)
    load_range: range = range(0)
    keys: list[BlockKey] = field(default_factory=list)

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.request_id

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return self.request.get_num_tokens() - self.request.orig_prompt_len

    @property
    def in_context(self) -> bool:
        """Whether some of the prompt is still to be computed, and nothing is being loaded for it."""
        return self.request.state is LlmRequestState.CONTEXT_INIT

    @property
    def generating(self) -> bool:
        """Whether the prompt is done and generation is not."""
        return self.request.state is LlmRequestState.GENERATION_IN_PROGRESS

    def block_keys(self, blocks: int) -> list[BlockKey]:
        """The reuse keys of the first `blocks` whole blocks."""
        size, tokens = self.request._block, self.request.get_tokens(0)
        while len(self.keys) < blocks:
            start = len(self.keys) * size
            self.keys.append(self.key_of(tokens[start : start + size], start))
        return self.keys[:blocks]

    def key_of(self, tokens: list[int], start: int) -> BlockKey:
        """The reuse key of tokens that begin at `start`."""
        end = start + len(tokens)
        media = [
            f"{item.position - start}:{item.content}"
            for item in self.spec.media
            if item.position < end and start < item.position + item.length
        ]
        return tuple(tokens), tuple(media)

    def result(self, error: str | None) -> SimResult:
        """What became of the request."""
        tokens = self.request.get_tokens(0)[self.request.orig_prompt_len :]
        return SimResult(
            request_id=self.id,
            tokens=tuple(tokens),
            prompt_tokens=self.request.orig_prompt_len,
            loaded_tokens=self.loaded,
            reused_tokens=self.reused,
            computed_tokens=self.computed,
            ttft_s=None if self.first_token_at is None else self.first_token_at - self.arrived,
            error=error,
            top_scores=tuple(self.scores),
        )


def activate(spec: SimRequest, config: SimConfig, now: float) -> Active:
    """A request that has just arrived."""
    adapter = None
    if spec.lora_task_id is not None:
        adapter = config.adapters.get(spec.lora_task_id, f"task {spec.lora_task_id}")
    request = LlmRequest(
        spec.request_id,
        spec.prompt_tokens,
        spec.max_new_tokens,
        tokens_per_block=config.tokens_per_block,
        cache_salt=spec.cache_salt,
        lora_task_id=spec.lora_task_id,
        media=[(item, spec.media_hashes) for item in spec.media],
        priority=spec.priority,
    )
    identity = Identity(adapter, spec.cache_salt, spec.media)
    unidentified = bool(spec.media) and not spec.media_hashes
    return Active(spec, request, identity, None if unidentified else (spec.cache_salt, adapter), now)


def dummy(request_id: int, config: SimConfig, now: float) -> Active:
    """A request of the runtime's own, such as pads a batch: its results go nowhere and its pages are never reused."""
    spec = SimRequest(request_id, (0,) * (config.tokens_per_block + 1), max_new_tokens=1)
    active = activate(spec, config, now)
    active.request.is_dummy = active.request.is_dummy_request = True
    active.request.is_attention_dp_dummy = config.attention_dp
    active.scope = None
    return active
