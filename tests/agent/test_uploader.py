"""What is put into the bucket, and what is not; in virtual time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.agents import small_spec
from support.virtual_agent import VirtualAgent, in_virtual_time

from s3kv.format.keys import FORMAT_KEY, chunks_prefix
from s3kv.format.limits import FORMAT
from s3kv.store.base import ObjectMeta
from s3kv.store.faults import Fault
from s3kv.store.memory import MemoryStore
from s3kv.tier.directory import Directory


async def keys(memory: MemoryStore) -> list[str]:
    return [meta.key for meta in await listed(memory, "")]


async def listed(memory: MemoryStore, prefix: str) -> list[ObjectMeta]:
    return [meta async for page in memory.list(prefix) for meta in page]


def prefix_of_another_format() -> MemoryStore:
    memory = MemoryStore()
    asyncio.run(memory.put(FORMAT_KEY, json.dumps({"format": FORMAT + 1, "kind": "s3kv"}).encode()))
    return memory


def test_nothing_is_put_into_a_prefix_of_another_format(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        for seed in range(3):
            assert agent.save(agent.chain(seed, 4)) == 4
        await agent.quiet()
        assert agent.total("dropped_blocks") == 12, "given up on and counted"
        assert agent.now() >= agent.settings.upload.give_up_s
        assert await keys(agent.memory) == [FORMAT_KEY]
        assert await agent.load(agent.chain(0, 4)) == 4, "host memory serves on"
        agent.check_at_rest()

    in_virtual_time(tmp_path, work, memory=prefix_of_another_format())


def test_what_waits_is_stored_once_the_prefix_is_right(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        chain = agent.chain(1, 4)
        agent.save(chain)
        await asyncio.sleep(agent.settings.upload.give_up_s / 2)
        await agent.memory.delete([FORMAT_KEY])
        await agent.stored(chain)
        assert agent.total("dropped_blocks") == 0

    in_virtual_time(tmp_path, work, memory=prefix_of_another_format())


def test_bytes_count_when_they_are_sent_even_if_the_record_takes_a_second_try(tmp_path: Path) -> None:
    async def work(agent: VirtualAgent) -> None:
        await agent.opened()
        agent.plan.expect("put", *[None] * len(agent.spec.groups), *[Fault.DENIED])
        chain = agent.chain(1, 4)
        agent.save(chain)
        await agent.stored(chain)
        await agent.quiet()
        assert agent.total("failed_puts") == 1
        sizes = [meta.size for meta in await listed(agent.memory, chunks_prefix(agent.spec.name))]
        assert agent.total("uploaded_bytes") == sum(sizes) > 0

    in_virtual_time(tmp_path, work)


def test_saving_again_what_the_bucket_knows_walks_back_once_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a block it would be a walk of up to a thousand steps each, while every other client waits."""

    async def work(agent: VirtualAgent) -> None:
        chain = agent.chain(1, 64)
        for end in (32, 64):
            assert agent.save(chain[:end]) == 32
            await agent.stored(chain[:end])
            await agent.quiet()
        agent.forget()
        walked: list[int] = []
        touch = Directory.touch_chain

        def counted(self: Directory, tip: bytes, most: int | None = None) -> int:
            walked.append(touch(self, tip, most))
            return walked[-1]

        with monkeypatch.context() as patch:
            patch.setattr(Directory, "touch_chain", counted)
            assert agent.save(chain) == 64
        assert walked == [1, 64], "the commit, from the head of what it saved; and the end of the request"
        assert (agent.total("known_blocks"), agent.total("dropped_blocks")) == (64, 0)
        agent.check_at_rest()

    # 32 blocks may wait for upload; known ones take no place among them.
    slot_bytes = small_spec().parts[0].slot_bytes
    in_virtual_time(tmp_path, work, tier={"capacity_bytes": 128 * slot_bytes, "dirty_max_fraction": 0.25})
