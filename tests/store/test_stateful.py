"""Random histories against a dict: the folder store exactly, and a lossy store within what lost answers allow."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.virtual_time import virtual_clock, virtual_time

from s3kv.errors import AlreadyExists, NotFound, PreconditionFailed, StoreError
from s3kv.store import Store
from s3kv.store.faults import Fault, FaultPlan, FaultStore
from s3kv.store.guard import GuardedStore, Limits
from s3kv.store.local import LocalStore
from s3kv.store.memory import MemoryStore
from s3kv.store.testing import all_keys

T = TypeVar("T")
KEYS = st.sampled_from(["a", "b/1", "b/2", "b-1", "b.x/1", "c/d/e", "c/d/é", "z"])
BODIES = st.binary(max_size=20)


class FolderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.store: Store = LocalStore(Path(self.folder.name), page_keys=2)
        self.model: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}

    def do(self, call: Awaitable[T]) -> T | type[BaseException]:
        async def run() -> T | type[BaseException]:
            try:
                return await call
            except StoreError as error:
                return type(error)

        return self.runner.run(run())

    def stored(self, key: str, body: bytes, result: Any) -> None:
        assert isinstance(result, str), result
        self.model[key] = body
        self.etags[key] = result

    @rule(key=KEYS, body=BODIES)
    def put(self, key: str, body: bytes) -> None:
        self.stored(key, body, self.do(self.store.put(key, body)))

    @rule(key=KEYS, body=BODIES)
    def put_if_absent(self, key: str, body: bytes) -> None:
        result = self.do(self.store.put_if_absent(key, body))
        if key in self.model:
            assert result is AlreadyExists
        else:
            self.stored(key, body, result)

    @rule(key=KEYS, body=BODIES, stale=st.booleans())
    def put_if_match(self, key: str, body: bytes, stale: bool) -> None:
        etag = "stale" if stale else self.etags.get(key, "never")
        result = self.do(self.store.put_if_match(key, body, etag))
        if key in self.model and not stale:
            self.stored(key, body, result)
        else:
            assert result is PreconditionFailed

    @rule(keys=st.lists(KEYS, max_size=4))
    def delete(self, keys: list[str]) -> None:
        assert self.do(self.store.delete(keys)) == []
        for key in keys:
            self.model.pop(key, None)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        expected = (self.model[key], self.etags[key]) if key in self.model else NotFound
        assert self.do(self.store.get_with_etag(key, 100)) == expected

    @rule(prefix=st.sampled_from(["", "b/", "c/", "c/d/", "x/"]), after=st.none() | KEYS | st.just("b"))
    def list(self, prefix: str, after: str | None) -> None:
        expected = sorted(key for key in self.model if key.startswith(prefix) and key > (after or ""))
        assert self.do(all_keys(self.store, prefix, after)) == expected

    @invariant()
    def prefixes_are_those_of_the_model(self) -> None:
        expected = sorted({key.split("/")[0] + "/" for key in self.model if "/" in key})
        assert self.do(self.store.list_prefixes("")) == expected

    def teardown(self) -> None:
        self.do(self.store.close())
        self.runner.close()
        self.folder.cleanup()


TestFolder = FolderMachine.TestCase

LOSSY = {
    **dict.fromkeys((Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.TRUNCATED, Fault.TIMEOUT), 0.08),
    **dict.fromkeys((Fault.STALL, Fault.PARTIAL_DELETE, Fault.LATENCY), 0.05),
}


async def lossy_history(seed: int) -> None:
    """Every answer that comes is true; where none came, the key holds the old content or the new."""
    rng, memory = random.Random(seed), MemoryStore(page_keys=3)
    limits = Limits(10.0, 2, 0.1, 1.0, 5, 2.0, 8, 5.0)
    faulty = FaultStore(memory, FaultPlan(seed, LOSSY))
    store = GuardedStore(faulty, limits, clock=virtual_clock, rng=rng)
    possible: dict[str, set[bytes | None]] = {}
    answered = 0
    for step in range(150):
        key = f"k/{rng.randrange(8)}"
        before = possible.setdefault(key, {None})
        body = f"{step}".encode()
        try:
            match rng.randrange(4):
                case 0:
                    before.add(body)
                    await store.put(key, body)
                    possible[key] = {body}
                case 1:
                    before.add(body)
                    await store.put_if_absent(key, body)
                    possible[key] = {body}
                case 2:
                    before.add(None)
                    if not await store.delete([key]):
                        possible[key] = {None}
                case _:
                    found = await store.get(key, 100)
                    assert found in before
                    possible[key] = {found}
            answered += 1
        except NotFound:
            assert None in before
            possible[key] = {None}
        except AlreadyExists:
            before.discard(None)
        except StoreError:
            await asyncio.sleep(1)
        held = memory._objects[key].data if key in memory._objects else None
        assert held in possible[key]
    assert answered > 50, "faults must not be all there is"


def test_what_a_lossy_store_answers_is_true() -> None:
    for seed in range(20):
        with virtual_time() as run:
            run(lossy_history(seed))
