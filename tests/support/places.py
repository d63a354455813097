"""The three kinds of store that commands are tried on, each with a bucket that something can be found in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from s3kv.format.records import ChunkAdded
from s3kv.settings import StoreSettings
from s3kv.store import Store, open_store
from support.bucket_fill import DAY_S, Filler, SettableClock, chain, filling, small_namespace, tokens_of
from support.command import Cli


@dataclass
class Place:
    """A store, the CLI on it, and ways to look past the code under test."""

    cli: Cli
    settings: StoreSettings
    folder: Path

    def within(self, work: Callable[[Store], Any]) -> Any:
        """Runs `work(store)`, a coroutine function."""

        async def run() -> Any:
            store = open_store(self.settings)
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(run())

    def keys(self) -> list[str]:
        async def listed(store: Store) -> list[str]:
            return [meta.key async for page in store.list("") for meta in page]

        return list(self.within(listed))


@pytest.fixture
def local(tmp_path: Path) -> Place:
    url = f"file://{tmp_path}/store"
    return Place(Cli("--store", url), StoreSettings(url=url), tmp_path)


@pytest.fixture(params=["local", "moto_place", "seaweedfs_place"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    found = request.getfixturevalue(request.param)
    return found if isinstance(found, Place) else Place(Cli.on(found), found.settings(), tmp_path)


@dataclass
class Filled:
    """Namespace `spec` with: an old chain, a newer one of two chunks, and an orphan."""

    place: Place
    old: ChunkAdded
    stem: ChunkAdded
    leaf: ChunkAdded
    orphan: ChunkAdded
    tokens: list[int]

    @property
    def cli(self) -> Cli:
        return self.place.cli


SPEC = small_namespace(groups=2)


def fill(place: Place) -> Filled:
    clock = SettableClock(time.time() - 40 * DAY_S)
    tokens = tokens_of("new", 6)

    async def work(store: Store) -> Filled:
        async with filling(store, SPEC, place.folder / "index", clock) as filler:
            return await _fill(filler, clock, place, tokens)

    return place.within(work)  # type: ignore[no-any-return]


async def _fill(filler: Filler, clock: SettableClock, place: Place, tokens: list[int]) -> Filled:
    hashes = chain(SPEC, "new", 6)
    old = await filler.put_chunk(chain(SPEC, "old", 3), 0, 3)
    orphan = await filler.put_chunk(chain(SPEC, "orphan", 2), 0, 2, publish=False)
    clock.now = time.time() - 3600
    stem = await filler.put_chunk(hashes, 0, 4)
    leaf = await filler.put_chunk(hashes, 4, 2)
    return Filled(place, old, stem, leaf, orphan, tokens)


@pytest.fixture
def filled(local: Place) -> Filled:
    return fill(local)


@pytest.fixture
def filled_everywhere(place: Place) -> Filled:
    return fill(place)
