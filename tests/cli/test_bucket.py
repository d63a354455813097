"""`s3kv bucket`, `s3kv usage`, `s3kv doctor`, `s3kv bench store`."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from support.command import Cli
from support.places import SPEC, Filled, Place
from support.servers import S3Place

from s3kv.errors import PermissionDenied, Unsupported
from s3kv.settings import StoreSettings


def new_bucket(server: S3Place) -> Cli:
    return Cli.on(S3Place(server.endpoint, f"b-{uuid.uuid4().hex[:12]}", server.access_key, server.secret_key))


def test_create_is_idempotent_and_passes_its_own_check(moto_place: S3Place) -> None:
    cli = new_bucket(moto_place)
    missing = cli("bucket", "check")
    assert missing.code == 1 and "store.url" in missing.err
    first = cli("bucket", "create", "--json").ok().json["changed"]
    assert {"bucket", "public_access_block", "encryption", "lifecycle"} <= set(first)
    assert cli("bucket", "create", "--json").ok().json["changed"] == []
    assert cli("bucket", "check", "--exact", "--json").ok().json["findings"] == []


def test_check_says_what_to_change(moto_place: S3Place) -> None:
    cli = new_bucket(moto_place)
    cli("bucket", "create").ok()
    bucket = cli.common[1].split("/")[2]
    moto_place.client().delete_bucket_lifecycle(Bucket=bucket)
    ran = cli("bucket", "check", "--json")
    assert ran.code == 1
    assert all("lifecycle" in each["property"] and each["remedy"] for each in ran.json["findings"])
    cli("bucket", "create").ok()
    cli("bucket", "check").ok()


def test_create_on_seaweedfs_leaves_out_what_it_does_not_offer(seaweedfs_place: S3Place) -> None:
    cli = new_bucket(seaweedfs_place)
    assert "bucket" in cli("bucket", "create", "--json").ok().json["changed"]
    cli("bucket", "list").ok()


def test_a_folder_is_a_bucket_too(tmp_path: Path) -> None:
    cli = Cli("--store", f"file://{tmp_path}/kv")
    assert cli("bucket", "check").code == 1
    assert cli("bucket", "create", "--json").ok().json["changed"] == ["folder"]
    assert cli("bucket", "create", "--json").ok().json["changed"] == []
    cli("bucket", "check").ok()
    (tmp_path / "kv").chmod(0o755)
    assert "chmod" in cli("bucket", "check", "--json").json["findings"][0]["remedy"]


def test_case_43_directory_buckets_are_refused_clearly_or_listed_by_folders(moto_place: S3Place) -> None:
    ran = Cli("--store", "s3://kv--use1-az5--x-s3/p", "--region", "us-east-1")("bucket", "create")
    assert ran.code == 1 and "directory bucket" in ran.err and ran.err.count("\n") == 1


def test_case_43_every_prefix_that_is_listed_ends_with_a_slash(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3kv.store.local import LocalStore

    listed: list[str] = []
    listing, folders = LocalStore.list, LocalStore.list_prefixes
    monkeypatch.setattr(LocalStore, "list", lambda self, p, after=None: (listed.append(p), listing(self, p, after))[1])
    monkeypatch.setattr(LocalStore, "list_prefixes", lambda self, p: (listed.append(p), folders(self, p))[1])
    for command in (
        ("usage",),
        ("verify",),
        ("ls", "ns"),
        ("inspect", filled.old.chunk_id.hex()),
        ("catalog", "rebuild"),
        ("catalog", "compact"),
        ("gc", "--max-bytes", "1", "--orphans", "--compact", "--grace", "0s", "--yes"),
        ("doctor",),
        ("bucket", "delete", "--everything", "--yes"),
    ):
        filled.cli(*command).ok()
    assert listed and all(prefix.endswith("/") for prefix in listed)


def test_list_and_usage(filled_everywhere: Filled) -> None:
    cli, place = filled_everywhere.cli, filled_everywhere.place
    (namespace,) = cli("bucket", "list", "--json").ok().json["namespaces"]
    assert (namespace["name"], namespace["model"], namespace["tokens_per_block"]) == (SPEC.name, SPEC.model, 4)
    (usage,) = cli("usage", "--json").ok().json["namespaces"]
    assert (usage["chunks"], usage["blocks"], usage["objects"]) == (3, 9, 6)
    assert usage["stored_objects"] == sum(key.startswith(f"ns/{SPEC.name}/") for key in place.keys())  # noqa: SIM118
    assert usage["stored_bytes"] > usage["bytes"] + filled_everywhere.orphan.size
    assert usage["age_bytes"]["30 to 90 days"] == filled_everywhere.old.size
    assert usage["added_bytes"] == {
        "1d": filled_everywhere.stem.size + filled_everywhere.leaf.size,
        "7d": filled_everywhere.stem.size + filled_everywhere.leaf.size,
        "30d": filled_everywhere.stem.size + filled_everywhere.leaf.size,
    }
    assert "A month costs about" in cli("usage").ok().out
    assert cli("usage", "-n", "absent").code == 1


def test_cost_follows_the_price_table(filled: Filled) -> None:
    expensive = ("--set", "price.storage_gb_month=1000000", "--set", "price.put_1000=1000")
    ran = filled.cli("usage", "--json", *expensive).ok().json
    assert ran["cost_usd_month"]["puts"] == 4.0
    stored = ran["namespaces"][0]["stored_bytes"]
    assert ran["cost_usd_month"]["storage"] == pytest.approx(stored / 2**30 * 1e6, abs=1e-3)


def test_delete_plans_shows_and_asks(filled_everywhere: Filled) -> None:
    cli, place = filled_everywhere.cli, filled_everywhere.place
    before = place.keys()
    assert cli("bucket", "delete").code == 2
    cli("bucket", "delete", "-n", SPEC.name[:6], "--dry-run").ok()
    assert cli("bucket", "delete", "-n", SPEC.name[:6]).code == 1  # nobody to ask
    assert place.keys() == before
    ran = cli("bucket", "delete", "-n", SPEC.name[:6], "--yes", "--json").ok().json
    assert ran["deleted_objects"] == len(before) - 1
    assert place.keys() == ["format.json"]
    cli("bucket", "delete", "--everything", "--yes").ok()
    assert place.keys() == []


def test_doctor_finds_a_healthy_place_healthy(place: Place) -> None:
    ran = place.cli("doctor", "--json", "--set", "tier.capacity_bytes=1048576").ok().json
    grades = {each["check"]: each["grade"] for each in ran["checks"]}
    store = ("write", "read", "read a range", "list", "conditional write", "replace if unchanged", "clock", "delete")
    assert {name: grades[name] for name in store} == dict.fromkeys(store, "ok")
    assert place.keys() == []


def test_doctor_gives_a_remedy_for_each_finding(tmp_path: Path) -> None:
    cli = Cli("--store", "s3://my-kv/p", "--endpoint", "http://127.0.0.1:9", "--set", "store.retries=0")
    keys = ("--set", "store.access_key_id=a", "--set", "store.secret_access_key=b")
    ran = cli("doctor", "--json", *keys)
    assert ran.code == 1
    bad = [each for each in ran.json["checks"] if each["grade"] in ("fail", "warn")]
    assert {"write", "TLS"} <= {each["check"] for each in bad} and all(each["remedy"] for each in bad)


@pytest.fixture(params=["each key", "the request"])
def cli_that_may_not_delete(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The Terraform module's node role may not: S3 answers a bulk delete key by key, a single one altogether."""
    from s3kv.store.base import DeleteError
    from s3kv.store.local import LocalStore

    async def denied(self: LocalStore, keys: list[str]) -> list[DeleteError]:
        error = PermissionDenied("the credentials may not delete")
        if request.param == "the request":
            raise error
        return [DeleteError(key, error) for key in keys]

    monkeypatch.setattr(LocalStore, "delete", denied)
    return Cli("--store", f"file://{tmp_path}/kv", "--set", "tier.capacity_bytes=1048576")


def test_a_node_that_may_not_delete_is_healthy(cli_that_may_not_delete: Cli) -> None:
    checks = cli_that_may_not_delete("doctor", "--json").ok().json["checks"]
    (delete,) = [each for each in checks if each["check"] == "delete"]
    assert (delete["grade"], "s3kv gc needs" in delete["remedy"]) == ("warn", True)


def test_what_a_bench_could_not_delete_is_said(cli_that_may_not_delete: Cli) -> None:
    bench = ("bench", "store", "--objects", "3", "--size", "64KiB")
    assert cli_that_may_not_delete(*bench, "--json").ok().json["left_objects"] == 3
    assert "3 objects are left under s3kv-scratch/" in cli_that_may_not_delete(*bench).ok().out


def test_doctor_tries_each_needed_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3kv.store.local import LocalStore

    async def refused(self: LocalStore, keys: list[str]) -> None:
        raise Unsupported("no bulk delete")

    monkeypatch.setattr(LocalStore, "delete", refused)
    ran = Cli("--store", f"file://{tmp_path}/kv")("doctor", "--json")
    assert ran.code == 1
    assert [each["check"] for each in ran.json["checks"] if each["grade"] == "fail"] == ["delete"]


def test_bench_measures_and_leaves_nothing(place: Place) -> None:
    bench = ("bench", "store", "--objects", "3", "--size", "64KiB", "--concurrency", "2", "--json")
    ran = place.cli(*bench, "--prefill", "1").ok().json
    assert ran["put_bytes_per_s"] > 0 and ran["break_even_tokens"] >= 1
    assert place.cli(*bench, "--prefill", "1e15").ok().json["break_even_tokens"] is None
    assert place.keys() == []


def test_bucket_commands_need_a_bucket() -> None:
    assert StoreSettings().url.startswith("file://")
    ran = Cli("--store", "memory://x")("bucket", "create")
    assert ran.code == 1 and "s3://bucket/prefix" in ran.err
