"""What tests of the connector share: engines of the simulated runtime on a `FakeAgent`, and caches of plain tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from s3kv.connector.bringup import Placement
from s3kv.connector.guard import Troubles
from s3kv.connector.layout import PagedCache, from_layout
from s3kv.connector.scheduler import SchedulerShell
from s3kv.connector.worker import WorkerShell
from s3kv.identity import NamespaceSpec
from s3kv.sim import ConnectorConfig, Engine, SimConfig, SimRequest, SimResult
from support.fake_agent import FakeAgent

CONNECTOR = ConnectorConfig("s3kv.connector", "S3KVScheduler", "S3KVWorker")
DRAIN_S = 20.0
SCORE_TOLERANCE = 1e-4


def use_agent(patch: pytest.MonkeyPatch, agent: FakeAgent, **variables: str) -> None:
    """Engines made from now on talk to `agent`. `variables`: S3KV settings, without the prefix."""
    patch.setenv("S3KV_IDENTITY__FINGERPRINT", "simulated weights")
    patch.setenv("S3KV_AGENT__RECONNECT_S", "0.01")
    for name, value in variables.items():
        patch.setenv(f"S3KV_{name.upper()}", value)
    patch.setattr(SchedulerShell, "client_factory", agent.leader)
    patch.setattr(WorkerShell, "client_factory", agent.worker)


@contextmanager
def serving(config: SimConfig) -> Iterator[Engine]:
    """An engine with the connector; afterwards all is drained and no request state is left."""
    with Engine(config, CONNECTOR) as engine:
        yield engine
        settle(engine)


def settle(engine: Engine) -> None:
    for executor in engine.executors:
        worker, scheduler = executor.driver.worker, executor.driver.scheduler
        assert worker.transfers.drain(DRAIN_S)
        assert worker.troubles.as_dict().keys() <= GOOD, worker.troubles.as_dict()
        assert worker.transfers.loader.idle
        if scheduler is not None:
            assert scheduler.troubles.as_dict() == {}
            assert len(scheduler.planner.tracker) == 0


GOOD = {"blocks_saved", "blocks_loaded", "blocks_not_reserved", "save_ring_full", "save_without_agent"}


def serve(config: SimConfig, requests: Sequence[SimRequest], **how: Any) -> list[SimResult]:
    with serving(config) as engine:
        return engine.generate(requests, **how)


def plain(config: SimConfig, requests: Sequence[SimRequest], **how: Any) -> list[SimResult]:
    """The same without a connector."""
    with Engine(config) as engine:
        return engine.generate(requests, **how)


def assert_same(expected: Sequence[SimResult], got: Sequence[SimResult]) -> None:
    """Tokens alike, and scores, which tell far more; a cancelled request counts as far as it came."""
    for want, have in zip(expected, got, strict=True):
        both = min(len(want.tokens), len(have.tokens)) if "cancelled" in (want.error, have.error) else None
        assert have.tokens[:both] == want.tokens[:both], (want, have)
        for left, right in zip(want.top_scores[:both], have.top_scores[:both], strict=True):
            assert abs(left - right) < SCORE_TOLERANCE, (want, have)


def again(requests: Sequence[SimRequest], offset: int = 1000) -> list[SimRequest]:
    """The same requests under other ids."""
    return [dataclasses.replace(request, request_id=request.request_id + offset) for request in requests]


# ---- without the simulated runtime ----


def pages_cache(
    groups: int = 1, pages: int = 8, size: int = 64, tokens_per_block: int = 4
) -> tuple[PagedCache, list[torch.Tensor]]:
    """A V2 layout over plain tensors, `[pages, size]` uint8 each, and the tensors."""
    pools = [torch.full((pages, size), 200 + group, dtype=torch.uint8) for group in range(groups)]
    described = [
        SimpleNamespace(
            layer_group_id=group,
            layer_ids=(group,),
            window_size=None if group == 0 else 32,
            regions=(
                SimpleNamespace(
                    base=pool.data_ptr(),
                    size=size,
                    stride=size,
                    num_slots=pages,
                    buffers=((group, "key"), (group, "value", 1)),
                ),
            ),
        )
        for group, pool in enumerate(pools)
    ]
    layout = SimpleNamespace(tokens_per_block=tokens_per_block, groups=tuple(described), dtype=torch.bfloat16)
    return from_layout(layout), pools


def namespace_for(cache: PagedCache, tokens_per_block: int = 4, shards: int = 1) -> NamespaceSpec:
    return NamespaceSpec("model", "weights", "bfloat16", tokens_per_block, cache.specs(), shards)


ALONE = Placement(0, 1, False, 0)


def fresh_troubles() -> Troubles:
    return Troubles()


class FakeRequest:
    """A request as the V2 runtime hands it over."""

    def __init__(self, request_id: int, tokens: Sequence[int], **fields: Any) -> None:
        self.request_id = request_id
        self.tokens = list(tokens)
        self.prompt_len = len(tokens)
        self.is_dummy_request = False
        self.cache_salt = None
        self.lora_task_id = None
        for name, value in fields.items():
            setattr(self, name, value)

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)


def report(
    request_id: int,
    tokens: Sequence[int],
    pages: Sequence[int],
    position: int,
    scheduled: int,
    *groups: Sequence[int],
    **fields: Any,
) -> SimpleNamespace:
    """A `RequestData`. With `groups`, they are the further layer groups' pages, and the flat list is empty."""
    by_group = [list(pages), *map(list, groups)] if groups else []
    return SimpleNamespace(
        request_id=request_id,
        new_tokens=list(tokens),
        new_block_ids=[] if groups else list(pages),
        new_block_ids_by_layer_group=by_group,
        computed_position=position,
        num_scheduled_tokens=scheduled,
        **fields,
    )


def output(new: Sequence[Any] = (), cached: Sequence[Any] = ()) -> SimpleNamespace:
    return SimpleNamespace(new_requests=list(new), cached_requests=list(cached))
