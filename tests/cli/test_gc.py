"""`s3kv gc` from plan to deletion, on every kind of store."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import redirect_stdout

import pytest
from s3kv_cli.main import main
from support.bucket_fill import DAY_S
from support.command import Cli
from support.places import SPEC, Filled, Place, fill
from support.servers import S3Place

from s3kv.format.keys import chunk_prefix, lease_key, log_prefix, parse_chunk_key
from s3kv.gc.lease import LeaseState
from s3kv.store import Store

NOW_GRACE = ("--grace", "0s")


def chunk_ids(place: Place) -> set[bytes]:
    return {key.chunk_id for key in map(parse_chunk_key, place.keys()) if key is not None}


def test_case_50_dry_run_deletes_nothing_and_touches_no_key(filled_everywhere: Filled) -> None:
    before = filled_everywhere.place.keys()
    ran = filled_everywhere.cli("gc", "--max-idle", "30d", "--orphans", "--dry-run", "--json").ok()
    assert ran.json["dry_run"] is True
    assert {(line["why"], line["chunks"]) for line in ran.json["plan"]} == {("idle", 1)}
    assert filled_everywhere.place.keys() == before


def test_case_50_by_age_deletes_what_was_idle_and_usage_tells_the_truth(filled_everywhere: Filled) -> None:
    cli, place = filled_everywhere.cli, filled_everywhere.place
    before = cli("usage", "--json").ok().json["namespaces"][0]
    ran = cli("gc", "--max-idle", "30d", "--yes", *NOW_GRACE, "--json").ok()
    assert ran.json["deleted"]["chunks"] == 1 and ran.json["deleted"]["objects"] == 2
    after = cli("usage", "--json").ok().json["namespaces"][0]
    assert before["bytes"] - after["bytes"] == ran.json["deleted"]["bytes"] == filled_everywhere.old.size
    assert chunk_ids(place) == {
        filled_everywhere.stem.chunk_id,
        filled_everywhere.leaf.chunk_id,
        filled_everywhere.orphan.chunk_id,
    }
    assert cli("gc", "--max-idle", "30d", "--yes", *NOW_GRACE).ok().out.startswith("Cut-offs")


def test_case_50_by_size_keeps_the_shared_prefix_longest(filled: Filled) -> None:
    limit = filled.stem.size
    filled.cli("gc", "--max-bytes", str(limit), "--yes", *NOW_GRACE).ok()
    assert chunk_ids(filled.place) == {filled.stem.chunk_id, filled.orphan.chunk_id}


def test_case_50_only_its_own_prefix_is_touched(moto_place: S3Place, tmp_path_factory: pytest.TempPathFactory) -> None:
    client = moto_place.client()
    others = [f"{moto_place.prefix}-other/ns/x", f"{moto_place.prefix}/unrelated", f"{moto_place.prefix}.txt"]
    for key in others:
        client.put_object(Bucket=moto_place.bucket, Key=key, Body=b"mine")
    filled = fill(Place(Cli.on(moto_place), moto_place.settings(), tmp_path_factory.mktemp("index")))
    filled.cli("gc", "--max-bytes", "1", "--orphans", "--yes", *NOW_GRACE).ok()
    filled.cli("bucket", "delete", "--everything", "--yes").ok()
    left = client.list_objects_v2(Bucket=moto_place.bucket, Prefix=moto_place.prefix)["Contents"]
    assert sorted(each["Key"] for each in left) == sorted(others)


def test_orphans_are_deleted_only_when_old(filled: Filled) -> None:
    aged = ("--set", "collect.orphan_age_s=0.000001")
    assert "Nothing to collect" in filled.cli("gc", "--orphans", "--yes").ok().out
    filled.cli("gc", "--orphans", "--yes", *NOW_GRACE, *aged).ok()
    assert filled.orphan.chunk_id not in chunk_ids(filled.place)
    assert filled.old.chunk_id in chunk_ids(filled.place)


def test_compact_merges_small_chunks_of_one_chain(filled: Filled) -> None:
    ran = filled.cli("gc", "--compact", "--yes", *NOW_GRACE, "--json").ok().json
    assert ran["merged"] == {"chunks_made": 1, "from": 2, "bad": 0}
    assert not {filled.stem.chunk_id, filled.leaf.chunk_id} & chunk_ids(filled.place)
    assert filled.cli("verify", "--json").ok().json["checked"] == 2
    usage = filled.cli("usage", "--json").ok().json["namespaces"][0]
    assert (usage["chunks"], usage["blocks"]) == (2, 9)


def test_an_interrupted_collection_is_taken_up_again(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3kv.store.guard import GuardedStore

    async def interrupted(self: GuardedStore, keys: list[str]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GuardedStore, "delete", interrupted)
        assert filled.cli("gc", "--max-idle", "30d", "--yes", *NOW_GRACE).code == 130
    assert filled.old.chunk_id in chunk_ids(filled.place)
    assert filled.cli("usage", "--json").json["namespaces"][0]["chunks"] == 2  # forgotten already
    ran = filled.cli("gc", "--max-idle", "30d", "--yes", *NOW_GRACE).ok()
    assert "taken up again" in ran.out
    assert filled.old.chunk_id not in chunk_ids(filled.place)
    assert "taken up again" not in filled.cli("gc", "--max-idle", "30d", "--yes", *NOW_GRACE).ok().out


def pending(place: Place, seconds_ago: float) -> None:
    """A collection published its deletions so long ago and was cut off."""
    state = LeaseState(epoch=1, holder="", pending_us=int((time.time() - seconds_ago) * 1e6))
    place.within(lambda store: store.put(lease_key("gc"), state.encode()))


def test_an_interruption_is_over_once_every_namespace_was_looked_at(filled: Filled) -> None:
    """Also when nothing was left of it: listing a whole bucket at every round costs money."""
    pending(filled.place, 600)
    collect = ("gc", "--max-idle", "100d", "--yes", "--json")
    assert filled.cli(*collect, "--namespace", SPEC.name[:6]).ok().json["resumes"] is True
    assert filled.cli(*collect, "--dry-run").ok().json["resumes"] is True
    assert filled.cli(*collect).ok().json["resumes"] is True
    assert filled.cli(*collect).ok().json["resumes"] is False


def test_what_an_interruption_left_long_ago_is_named_by_no_record(filled: Filled) -> None:
    """The catalog no longer remembers the deletions then."""
    aged = ("--set", "collect.orphan_age_s=0.000001")
    pending(filled.place, 600)
    filled.cli("gc", "--max-idle", "100d", "--yes", *NOW_GRACE, *aged).ok()
    assert filled.orphan.chunk_id in chunk_ids(filled.place)
    pending(filled.place, 2 * DAY_S)
    filled.cli("gc", "--max-idle", "100d", "--yes", *NOW_GRACE, *aged).ok()
    assert filled.orphan.chunk_id not in chunk_ids(filled.place)
    assert filled.old.chunk_id in chunk_ids(filled.place)


def test_a_damaged_catalog_makes_no_orphans_and_a_rebuild_mends_it(filled: Filled) -> None:
    async def damage(store: Store) -> None:
        for meta in [meta async for page in store.list(log_prefix(SPEC.name)) for meta in page]:
            await store.put(meta.key, b"?" * meta.size)

    filled.place.within(damage)
    before = chunk_ids(filled.place)
    aged = ("--set", "collect.orphan_age_s=0.000001")
    ran = filled.cli("gc", "--orphans", "--yes", *NOW_GRACE, *aged).ok()
    assert "run s3kv catalog rebuild first" in ran.out and chunk_ids(filled.place) == before
    (rebuilt,) = filled.cli("catalog", "rebuild", "--json").ok().json
    assert (rebuilt["found"], rebuilt["unreadable"] > 0) == (4, True)
    assert "Nothing to collect: 4 chunks" in filled.cli("gc", "--orphans", "--yes", *aged).ok().out


def test_a_chunk_that_is_stored_again_during_the_grace_period_stays(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer saw the object, wrote nothing, and published its record after the deletion."""
    from s3kv.gc import execute

    original = execute._Run.wait

    async def wait(self: execute._Run) -> None:
        await original(self)
        await self._places[SPEC.name].catalog.publish([filled.old])  # type: ignore[attr-defined]

    monkeypatch.setattr(execute._Run, "wait", wait)
    ran = filled.cli("gc", "--max-idle", "30d", "--yes", *NOW_GRACE, "--json").ok().json
    assert ran["stored_again"] == 1 and ran["deleted"]["chunks"] == 0
    assert filled.old.chunk_id in chunk_ids(filled.place)


def test_case_47_like_2501_keys_are_listed_and_deleted_in_batches(
    moto_place: S3Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = Place(Cli.on(moto_place), moto_place.settings(), tmp_path_factory.mktemp("index"))
    fill(place)

    async def put_orphans(store: Store) -> None:
        for number in range(2501):
            await store.put(f"{chunk_prefix(SPEC.name, number.to_bytes(16, 'big'))}g0", b"x")

    place.within(put_orphans)
    ran = place.cli("gc", "--orphans", "--yes", *NOW_GRACE, "--set", "collect.orphan_age_s=0.000001", "--json").ok()
    assert ran.json["deleted"]["chunks"] == 2502  # and the orphan that was there
    assert len(chunk_ids(place)) == 3


def test_errors_inside_a_200_answer_are_counted_and_told(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3kv.errors import PermissionDenied
    from s3kv.store import DeleteError
    from s3kv.store.guard import GuardedStore

    async def refused(self: GuardedStore, keys: list[str]) -> list[DeleteError]:
        return [DeleteError(key, PermissionDenied("AccessDenied")) for key in keys]

    monkeypatch.setattr(GuardedStore, "delete", refused)
    ran = filled.cli("gc", "--max-idle", "30d", "--yes", *NOW_GRACE, "--json")
    assert ran.code == 1 and len(ran.json["failures"]) == 2 and ran.json["deleted"]["chunks"] == 0


def test_nothing_to_collect_by_is_wrong_use(filled: Filled) -> None:
    ran = filled.cli("gc", "--yes")
    assert ran.code == 2 and "collect.max_bytes" in ran.err


def test_without_a_terminal_only_yes_deletes(filled: Filled) -> None:
    before = filled.place.keys()
    ran = filled.cli("gc", "--max-idle", "30d")
    assert ran.code == 1 and "--yes" in ran.err
    assert filled.place.keys() == before


def test_every_goes_on_after_a_failure_and_ends_by_a_signal(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3kv_cli import gc

    from s3kv.errors import Transient

    rounds: list[int] = []
    original = gc._round

    async def scripted(session: object, options: gc.Options) -> int:
        rounds.append(1)
        if len(rounds) == 1:
            raise Transient("the store is away")
        if len(rounds) == 3:
            signal.raise_signal(signal.SIGTERM)
        return await original(session, options)  # type: ignore[arg-type]

    monkeypatch.setattr(gc, "_round", scripted)
    ran = filled.cli("gc", "--max-idle", "30d", "--every", "0.01s", "--yes", *NOW_GRACE)
    assert ran.code == 130 and "the store is away" in ran.err
    assert filled.old.chunk_id not in chunk_ids(filled.place)
    assert filled.cli("gc", "--every", "1h", "--max-idle", "1d").code == 2


def test_rounds_are_a_line_of_json_each_as_soon_as_it_is_known(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3kv_cli import gc

    rounds: list[int] = []
    original = gc._round

    async def scripted(session: object, options: gc.Options) -> int:
        if rounds:
            reads.append(os.read(reading, 1 << 16))  # what this process has written by now, as its reader sees it
        rounds.append(1)
        if len(rounds) == 3:
            signal.raise_signal(signal.SIGTERM)
        return await original(session, options)  # type: ignore[arg-type]

    reads: list[bytes] = []
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setattr(gc, "_round", scripted)
    with open(writing, "w") as out, redirect_stdout(out):  # noqa: PTH123 - a descriptor
        code = main([*filled.cli.common, "gc", "--max-idle", "30d", "--every", "0.01s", "--yes", *NOW_GRACE, "--json"])
    os.close(reading)
    assert code == 130 and [line.count(b"\n") for line in reads] == [1, 1]
    first, second = map(json.loads, reads)
    assert first["deleted"]["chunks"] == 1 and second["plan"] == []
