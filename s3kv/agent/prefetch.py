"""Bringing a chain into host memory before anybody asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from s3kv.agent.fetcher import Fetcher
from s3kv.tier.block import Held
from s3kv.tier.directory import Directory

PAUSE_S = 0.1
"""After fetches that brought nothing: a store that refuses at once must not be hammered."""


async def prefetch(fetcher: Fetcher, directory: Directory, hashes: Sequence[bytes], deadline_s: float) -> None:
    """Returns when nothing more of `hashes` will come, or the deadline has passed.

    What has come is held meanwhile: the end of a chain that is longer than host memory must not evict its head. The
    chain is looked up once a round, not with every arrival: tens of thousands of blocks would hold up the event loop.
    """
    held: list[Held] = []
    try:
        async with asyncio.timeout(deadline_s):
            rest = _hold_on(directory, hashes, held)
            while rest and fetcher.start(rest):
                await fetcher.arrived(rest)
                before, rest = len(rest), _hold_on(directory, hashes, held)
                if len(rest) == before:
                    await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        pass
    finally:
        for each in reversed(held):
            directory.unhold(each)


def _hold_on(directory: Directory, hashes: Sequence[bytes], held: list[Held]) -> Sequence[bytes]:
    """Hold what is resident right behind the blocks that are held; returns the rest."""
    for block in hashes[len(held) :]:
        each = directory.hold(block)
        if each is None:
            break
        held.append(each)
    return hashes[len(held) :]
