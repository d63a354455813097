"""A handful of seeds of the chaos runner, and proof that the runner finds what it looks for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.servers import S3Place

from benchmarks.chaos import run_seed, scratch, totals
from benchmarks.chaos_audit import audit
from benchmarks.chaos_plan import ACTIONS, make_plan
from benchmarks.chaos_run import ChaosRun
from s3kv.catalog.browse import find_namespaces, temporary_catalog
from s3kv.format.keys import chunk_key
from s3kv.settings import CatalogSettings
from s3kv.store.opening import open_unguarded

SEEDS = (3, 5, 12, 20)
"""Together they kill and stop agents and engines, collect, damage objects and fail the store."""

pytestmark = pytest.mark.xdist_group("chaos")


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_over_real_processes_leaves_nothing_wrong(seed: int) -> None:
    with scratch(seed) as folder:
        outcome = run_seed(seed, folder)
    assert outcome.problems == []
    assert outcome.wrong_tokens == 0 < outcome.requests


@pytest.mark.slow
def test_a_storm_on_s3_behind_the_faulty_proxy_leaves_nothing_wrong(seaweedfs_place: S3Place) -> None:
    with scratch(101) as folder:
        outcome = run_seed(101, folder, seaweedfs_place)
    assert outcome.problems == []
    assert outcome.wrong_tokens == 0 < outcome.requests


def test_a_seed_is_always_the_same_plan() -> None:
    assert make_plan(7, "file") == make_plan(7, "file")
    assert make_plan(7, "file") != make_plan(8, "file")


def test_the_plans_of_many_seeds_hold_every_action() -> None:
    seen = {action.kind for seed in range(400) for action in make_plan(seed, "file").actions}
    assert seen == set(ACTIONS)


# ---- the runner notices


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> ChaosRun:
    """A run in fair weather, over, with its bucket left."""
    folder = tmp_path_factory.mktemp("fair")
    run = ChaosRun(make_plan(3, "file").without_faults(), folder, {"url": f"file://{folder}/store"})
    assert run.run().problems == []
    return run


@pytest.fixture
def looked_at(ended: ChaosRun) -> Any:
    ended.outcome.problems.clear()
    yield ended
    ended.outcome.problems.clear()


def recorded_chunk(run: ChaosRun) -> Path:
    """An object of a chunk that has a record: what an agent was just storing at its end has none."""

    async def keys() -> list[str]:
        store = open_unguarded(run.direct)
        found = []
        for spec in (await find_namespaces(store)).namespaces:
            async with temporary_catalog(store, spec, CatalogSettings(map_bytes=1 << 26)) as catalog:
                found += [chunk_key(spec.name, entry.chunk_id, 0) for entry in catalog.iter_chunks()]
        await store.close()
        return found

    return run.folder / "store" / min(asyncio.run(keys()))


def test_a_wrong_token_and_a_wrong_score_are_noticed(looked_at: ChaosRun) -> None:
    right = dict(looked_at.expected[0])
    looked_at.judge(1, right)
    assert looked_at.outcome.problems == []
    looked_at.judge(1, right | {"tokens": [token + 1 for token in right["tokens"]]})
    looked_at.judge(1, right | {"top_scores": [score + 1e-6 for score in right["top_scores"]]})
    looked_at.judge(1, right | {"top_scores": [float("nan") for _ in right["top_scores"]]})
    assert len(looked_at.outcome.problems) == 3


def test_a_damaged_object_is_noticed_unless_the_run_damaged_it(looked_at: ChaosRun) -> None:
    path = recorded_chunk(looked_at)
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        audit(looked_at)
    finally:
        path.write_bytes(before)
    assert any("g0" in problem for problem in looked_at.outcome.problems)
    assert any("record" in problem for problem in looked_at.outcome.problems)


def test_a_record_without_its_object_is_noticed(looked_at: ChaosRun) -> None:
    path = recorded_chunk(looked_at)
    before = path.read_bytes()
    path.unlink()
    try:
        audit(looked_at)
    finally:
        path.write_bytes(before)
    assert ["record" in problem for problem in looked_at.outcome.problems] == [True]


def test_a_raw_salt_and_a_strange_key_are_noticed(looked_at: ChaosRun) -> None:
    strange = looked_at.folder / "store" / "ns" / "notes.txt"
    strange.write_text(f"tenant {looked_at.plan.salts[0]}")
    try:
        audit(looked_at)
    finally:
        strange.unlink()
    assert any("raw salt" in problem for problem in looked_at.outcome.problems)
    assert any("strange key" in problem for problem in looked_at.outcome.problems)


def test_totals_name_failing_seeds(looked_at: ChaosRun) -> None:
    looked_at.problem("something")
    assert totals([looked_at.outcome])["failed_seeds"] == {3: ["something"]}
