"""Any order of anything: agents with skewed clocks on one bucket, killed between and within their steps."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.catalog_model import Died, RecordingStore, check_catalog
from support.catalogs import FakeClock, Node, added, chain, namespace

from s3kv.catalog.catalog import Catalog
from s3kv.format.records import DeleteReason

SPEC = namespace()
CHAINS = [chain(name, 4) for name in "abc"]
AGENTS = st.integers(0, 2)
CHUNKS = st.tuples(st.sampled_from(CHAINS), st.integers(0, 3), st.integers(1, 4))


class CatalogMachine(RuleBasedStateMachine):
    """The model is the join of every segment ever written; agents know a part of it, and all of it after a full
    listing, whoever compacted or died meanwhile."""

    @initialize(skews=st.tuples(*[st.integers(-250, 250)] * 3))
    def begin(self, skews: tuple[int, ...]) -> None:
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.store = RecordingStore(clock=self.clock, page_keys=4)
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.nodes = [
            Node(self.store, self.folder / str(at), agent=at + 1, clock=lambda skew=skew: self.clock() + skew)
            for at, skew in enumerate(skews)
        ]
        for node in self.nodes:
            self.run(node.start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def at(self, agent: int) -> Catalog:
        return self.nodes[agent].catalog

    def survive(self, agent: int, work: Coroutine[Any, Any, Any]) -> None:
        """Runs a step in which the agent may die; then it starts again."""
        try:
            self.run(work)
        except Died:
            self.run(self.nodes[agent].restart())
        self.store.dies_in = None

    @rule(agent=AGENTS, chunks=st.lists(CHUNKS, min_size=1, max_size=3))
    def publish(self, agent: int, chunks: list[tuple[list[bytes], int, int]]) -> None:
        records = [added(SPEC, blocks[first : first + count]) for blocks, first, count in chunks if first < 4]
        self.run(self.at(agent).publish(records))
        for record in records:
            assert self.at(agent).chunk(record.chunk_id) is not None

    @rule(agent=AGENTS, which=st.integers(0, 100))
    def forget(self, agent: int, which: int) -> None:
        known = [entry.chunk_id for entry in self.at(agent).iter_chunks()]
        if known:
            gone = known[which % len(known)]
            assert self.run(self.at(agent).forget([gone], DeleteReason.MISSING)) == 1
            assert self.at(agent).chunk(gone) is None

    @rule(agent=AGENTS)
    def poll(self, agent: int) -> None:
        self.run(self.at(agent).poll())

    @rule(agent=AGENTS)
    def poll_all(self, agent: int) -> None:
        self.full_poll(agent)
        stored = {entry.chunk_id: entry.added for entry in self.at(agent).iter_chunks()}
        assert stored == self.store.stored()

    def full_poll(self, agent: int) -> None:
        self.at(agent)._syncer.wants_full = True
        self.run(self.at(agent).poll())

    @rule(agent=AGENTS, force=st.booleans())
    def compact(self, agent: int, force: bool) -> None:
        self.run(self.at(agent).compact(force=force))

    @rule(agent=AGENTS)
    def kill(self, agent: int) -> None:
        self.run(self.nodes[agent].restart())

    @rule(agent=AGENTS)
    def lose_the_index(self, agent: int) -> None:
        self.nodes[agent].kill()
        shutil.rmtree(self.nodes[agent].folder)
        self.run(self.nodes[agent].start())
        stored = {entry.chunk_id: entry.added for entry in self.at(agent).iter_chunks()}
        assert stored == self.store.stored()

    @rule(agent=AGENTS, step=st.integers(1, 4), after=st.booleans(), chunk=CHUNKS, compacts=st.booleans())
    def die_within(self, agent: int, step: int, after: bool, chunk: Any, compacts: bool) -> None:
        blocks, first, count = chunk
        self.store.dies_in, self.store.dies_after = step, after
        if compacts:
            self.survive(agent, self.at(agent).compact(force=True))
        else:
            self.survive(agent, self.at(agent).publish([added(SPEC, blocks[first : first + count])]))

    @rule(seconds=st.sampled_from([0.0, 1.0, 50.0, 100.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: hasattr(self, "nodes"))
    @invariant()
    def tables_agree(self) -> None:
        for node in self.nodes:
            check_catalog(node.catalog)

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        try:
            for agent in range(3):
                self.full_poll(agent)
                stored = {entry.chunk_id: entry.added for entry in self.at(agent).iter_chunks()}
                assert stored == self.store.stored()
        finally:
            for node in self.nodes:
                node.kill()
            self.runner.close()
            shutil.rmtree(self.folder)


TestCatalogMachine = CatalogMachine.TestCase
