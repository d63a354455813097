"""What the bucket holds of prompts, before and after."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from s3kv.catalog.entry import ChunkEntry, Location
from s3kv.warm.plan import Chained


class Lookup(Protocol):
    """What is asked of a catalog."""

    def lookup(self, hashes: Sequence[bytes]) -> list[Location]: ...
    def chunk(self, chunk_id: bytes) -> ChunkEntry | None: ...
    async def poll(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Gain:
    """Of blocks that the bucket holds now and did not hold before; `bytes` as stored, a block's share of its chunk."""

    blocks: int
    tokens: int
    bytes: int


def stored_blocks(catalog: Lookup, prompts: Sequence[Chained]) -> list[int]:
    """How many blocks of each prompt's prefix the bucket holds."""
    return [len(catalog.lookup(each.hashes)) for each in prompts]


async def wait_stored(
    catalog: Lookup,
    prompts: Sequence[Chained],
    items: Iterable[int],
    *,
    deadline_s: float,
    interval_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]],
) -> list[int]:
    """Polls the catalog until every prompt of `items` is stored whole; the items that are not when the time is over."""
    left = list(items)
    end = clock() + deadline_s
    while True:
        await catalog.poll()
        left = [item for item in left if len(catalog.lookup(prompts[item].hashes)) < len(prompts[item].hashes)]
        if not left or clock() >= end:
            return left
        await sleep(interval_s)


def gain(catalog: Lookup, prompts: Sequence[Chained], before: Sequence[int], tokens_per_block: int) -> Gain:
    """`before` is what `stored_blocks` said."""
    fresh: dict[bytes, float] = {}
    for each, held in zip(prompts, before, strict=True):
        places = catalog.lookup(each.hashes)
        for block, place in zip(each.hashes[held : len(places)], places[held:], strict=True):
            entry = catalog.chunk(place.chunk_id)
            fresh[block] = entry.size / len(entry.blocks) if entry is not None else 0.0
    return Gain(len(fresh), len(fresh) * tokens_per_block, round(sum(fresh.values())))
