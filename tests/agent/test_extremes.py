"""Namespaces and tiers of unusual shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.agents import FakeEngine, agent_settings, running_agent, small_spec

from s3kv.agent.packer import Packer
from s3kv.agent.pages import Pages
from s3kv.client.engine import LeaderClient
from s3kv.format.limits import MAX_BLOCKS, MAX_FRAMES, MAX_OBJECT_BYTES
from s3kv.identity import GroupSpec, NamespaceSpec, RegionSpec
from s3kv.store.memory import MemoryStore


@pytest.mark.parametrize("shards", [1, 17, 64])
@pytest.mark.parametrize("page", [256, 1 << 20])
def test_no_chunk_is_planned_that_the_format_cannot_hold(shards: int, page: int) -> None:
    groups = tuple(GroupSpec((layer,), None, (RegionSpec(size),)) for layer, size in enumerate((page, 256)))
    pages = Pages(NamespaceSpec("m", "w", "bfloat16", 4, groups, shards=shards), {})
    packer = Packer(pages.block_bytes, 1 << 50, 1.0, 1.0, pages.most_blocks)
    assert 1 <= packer.max_blocks <= MAX_BLOCKS
    assert packer.max_blocks * shards <= MAX_FRAMES
    assert packer.max_blocks * shards * page < MAX_OBJECT_BYTES


def test_the_one_block_of_a_tiny_tier_is_stored(tmp_path: Path) -> None:
    spec = small_spec()
    settings = agent_settings(tmp_path, tier={"capacity_bytes": spec.parts[0].slot_bytes})
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        chain = engine.chain(1, 1)
        assert engine.save(chain) == 1
        assert agent.drain() == (1, 0)
        engine.close()


@pytest.mark.parametrize("others", [0, 1])
def test_a_layer_group_without_bytes_is_refused_in_a_sentence(tmp_path: Path, others: int) -> None:
    """No object could say that it holds nothing, so no chunk of such a namespace could be stored."""
    groups = (GroupSpec((0,), None, (RegionSpec(256),)),) * others + (GroupSpec((1,), None, ()),)
    settings = agent_settings(tmp_path)
    with running_agent(settings, MemoryStore()) as agent:
        leader = LeaderClient(settings, NamespaceSpec("m", "w", "bfloat16", 4, groups), ranks=1, engine_id="e")
        assert not leader.connect()
        assert agent.totals().total(agent.totals().refused_clients) == 0, "it was answered"
        assert agent.call(lambda: len(agent.agent.node.namespaces)) == 0  # type: ignore[union-attr]
        leader.close()


def test_without_uploads_nothing_counts_as_dropped(tmp_path: Path) -> None:
    settings, spec = agent_settings(tmp_path, upload={"enabled": False}), small_spec()
    with running_agent(settings, MemoryStore()) as agent:
        engine = FakeEngine.start(settings, spec)
        chain = engine.chain(1, 3)
        assert (engine.save(chain), engine.load(chain)) == (3, 3)
        assert agent.totals().total(agent.totals().dropped_blocks) == 0
        engine.close()
