"""`s3kv ls | inspect | verify` and `s3kv catalog`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.places import SPEC, Filled, Place

from s3kv.format.keys import chunk_key, log_prefix, snap_prefix
from s3kv.store import Store


def damage(filled: Filled, key: str, at: int = -1) -> None:
    async def work(store: Store) -> None:
        body = bytearray(await store.get(key, 1 << 20))
        body[at] ^= 1
        await store.put(key, bytes(body))

    filled.place.within(work)


def remove(filled: Filled, *keys: str) -> None:
    async def work(store: Store) -> None:
        await store.delete(keys)

    filled.place.within(work)


def test_ls_shows_one_level_or_all(filled_everywhere: Filled) -> None:
    cli = filled_everywhere.cli
    top = cli("ls", "--json").ok().json
    # SeaweedFS goes on to show a folder whose last object was deleted.
    assert [each["key"] for each in top["objects"] if each["key"] != "s3kv-scratch/"] == ["format.json", "ns/"]
    inside = [each["key"] for each in cli("ls", f"ns/{SPEC.name}", "--json").ok().json["objects"]]
    names = ("chunk/", "log/", "namespace.json")
    assert inside == [f"ns/{SPEC.name}/{name}" for name in names]
    everything = cli("ls", "--recursive", "--json").ok().json["objects"]
    assert sorted(each["key"] for each in everything) == sorted(filled_everywhere.place.keys())
    limited = cli("ls", "-r", "--limit", "2", "--json").ok().json
    assert limited["more"] is True and len(limited["objects"]) == 2


def test_inspect_tells_header_blocks_and_checksums(filled_everywhere: Filled) -> None:
    stem = filled_everywhere.stem
    found = filled_everywhere.cli("inspect", stem.chunk_id.hex(), "--json").ok().json
    assert [each["layer_group"] for each in found] == [0, 1]
    assert [row["hash"] for row in found[0]["rows"]] == [block.hex() for block in stem.blocks]
    assert "every checksum is right" in filled_everywhere.cli("inspect", found[0]["key"]).ok().out


def test_inspect_finds_damage(filled: Filled) -> None:
    key = chunk_key(SPEC.name, filled.stem.chunk_id, 1)
    damage(filled, key)
    ran = filled.cli("inspect", key)
    assert ran.code == 1 and "BAD" in ran.out and "checksum" in ran.out
    damage(filled, key, at=20)
    assert filled.cli("inspect", key, "--json").json[0]["kind"] == "damaged"


def test_inspect_reads_every_kind_of_object(filled: Filled) -> None:
    filled.cli("catalog", "compact").ok()
    keys = filled.place.keys()
    for prefix, kind in ((log_prefix(SPEC.name), "catalog segment"), (snap_prefix(SPEC.name), "catalog snapshot")):
        key = next(key for key in keys if key.startswith(prefix))
        assert filled.cli("inspect", key, "--json").ok().json[0]["kind"] == kind
    described = filled.cli("inspect", f"ns/{SPEC.name}/namespace.json", "--json").ok().json[0]
    assert described["model"] == SPEC.model


def test_inspect_of_what_is_not_there_or_not_ours(filled: Filled) -> None:
    assert filled.cli("inspect", "0" * 32).code == 1
    assert filled.cli("inspect", "format.jsn").code == 1


@pytest.mark.parametrize("command", ["ls", "inspect"])
@pytest.mark.parametrize("key", ["../x", "a//b", "a\\b", "\x01", "x" * 2000])
def test_a_key_that_no_object_can_have_is_wrong_use(local: Place, command: str, key: str) -> None:
    ran = local.cli(command, key)
    assert ran.code == 2 and "internal error" not in ran.err


def test_slashes_around_a_key_and_the_whole_url_are_no_matter(filled: Filled) -> None:
    url = filled.place.settings.url
    for name in ("ns", "/ns", "ns/", "//ns//", f"{url}/ns/"):
        assert [each["key"] for each in filled.cli("ls", name, "--json").ok().json["objects"]] == [f"ns/{SPEC.name}/"]
    for name in ("format.json", "/format.json", f"{url}/format.json"):
        assert filled.cli("inspect", name, "--json").ok().json[0]["key"] == "format.json"


def test_names_are_shown_as_they_are(local: Place) -> None:
    """Rich would take some for markup and fail, others for emoji."""

    async def work(store: Store) -> None:
        for key in ("[/red]", ":cat:"):
            await store.put(key, b"x")

    local.within(work)
    shown = local.cli("ls", "-r").ok().out
    assert "[/red]" in shown and ":cat:" in shown
    inspected = local.cli("inspect", "[/red]")
    assert "[/red]" in inspected.out + inspected.err and "internal error" not in inspected.err


def test_verify_reads_all_and_finds_what_is_bad(filled_everywhere: Filled) -> None:
    filled = filled_everywhere
    ran = filled.cli("verify", "--json").ok().json
    stored = filled.old.size + filled.stem.size + filled.leaf.size
    assert (ran["checked"], ran["bytes"], ran["bad"]) == (3, stored, [])
    damage(filled, chunk_key(SPEC.name, filled.old.chunk_id, 0))
    remove(filled, chunk_key(SPEC.name, filled.leaf.chunk_id, 1))
    ran = filled.cli("verify", "--json")
    reasons = {each["chunk"]: each["reason"] for each in ran.json["bad"]}
    expected = {filled.old.chunk_id.hex(): "corrupt", filled.leaf.chunk_id.hex(): "missing"}
    assert ran.code == 1 and reasons == expected
    assert filled.cli("verify", "--repair").code == 1
    assert filled.cli("verify", "--json").ok().json["checked"] == 1


def test_verify_can_sample_and_go_on_where_it_was_stopped(filled: Filled, tmp_path: Path) -> None:
    assert filled.cli("verify", "--sample", "0", "--json").ok().json["checked"] == 0
    ids = sorted([filled.old.chunk_id, filled.stem.chunk_id, filled.leaf.chunk_id])
    state = tmp_path / "state.json"
    state.write_text(json.dumps({SPEC.name: ids[1].hex()}))
    assert filled.cli("verify", "--state", str(state), "--json").ok().json["checked"] == 1
    assert not state.exists()


@pytest.mark.parametrize(
    "content",
    ['{"name": "x", "version": "1"}', "{}", "[]", "", '{"%s": 7}' % ("0" * 32), '{"a": "%s"}' % ("0" * 32), "[" * 9999],
)
def test_verify_leaves_a_file_alone_that_is_no_state_of_its_own(filled: Filled, tmp_path: Path, content: str) -> None:
    file = tmp_path / "package.json"
    file.write_text(content)
    ran = filled.cli("verify", "--state", str(file))
    assert ran.code == 2 and "--state" in ran.err and "internal error" not in ran.err
    assert file.read_text() == content


def test_verify_takes_a_regular_file_in_a_folder_it_may_write_to(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3kv.catalog import browse

    async def read(store: object) -> None:
        raise AssertionError("the bucket was read before the file was looked at")

    monkeypatch.setattr(browse, "find_namespaces", read)
    state = tmp_path / "state.json"
    state.write_text(json.dumps({SPEC.name: "0" * 32}))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(state)
    (tmp_path / "dangling").symlink_to("absent")
    before = sorted(tmp_path.iterdir())
    for path in ("pipe", "link", "dangling", "", "absent/state.json", "state.json/x"):
        ran = filled.cli("verify", "--state", str(tmp_path / path))
        assert ran.code == 2 and "--state" in ran.err, path
    assert sorted(tmp_path.iterdir()) == before and json.loads(state.read_text())


def test_verify_keeps_its_place_when_it_is_stopped(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3kv.gc.verify import Summary

    def stopped(self: Summary, verdict: object) -> None:
        if self.checked:
            raise KeyboardInterrupt
        add(self, verdict)  # type: ignore[arg-type]

    add = Summary.add
    monkeypatch.setattr(Summary, "add", stopped)
    state = tmp_path / "state.json"
    assert filled.cli("verify", "--state", str(state)).code == 130
    assert [path.name for path in tmp_path.glob("state*")] == ["state.json"]
    monkeypatch.undo()
    assert filled.cli("verify", "--state", str(state), "--json").ok().json["checked"] == 2
    assert not state.exists()


def test_verify_takes_no_outage_for_damage(filled: Filled, monkeypatch: object) -> None:
    from pytest import MonkeyPatch

    from s3kv.errors import StoreTimeout
    from s3kv.store.guard import GuardedStore

    async def silent(self: GuardedStore, key: str) -> None:
        raise StoreTimeout("no answer")

    assert isinstance(monkeypatch, MonkeyPatch)
    monkeypatch.setattr(GuardedStore, "head", silent)
    ran = filled.cli("verify", "--repair", "--json")
    # Opening the catalog asks for a head as well: the command fails as a whole, and repairs nothing.
    assert ran.code == 1
    monkeypatch.undo()
    assert filled.cli("verify", "--json").ok().json["checked"] == 3


def test_catalog_is_rebuilt_from_the_chunks(filled_everywhere: Filled) -> None:
    filled = filled_everywhere
    remove(filled, *(key for key in filled.place.keys() if key.startswith(log_prefix(SPEC.name))))  # noqa: SIM118
    assert filled.cli("usage", "--json").ok().json["namespaces"][0]["chunks"] == 0
    assert filled.cli("catalog", "rebuild", "--json").ok().json[0]["found"] == 4
    usage = filled.cli("usage", "--json").ok().json["namespaces"][0]
    assert usage["chunks"] == 4 and usage["blocks"] == 3 + 2 + 4 + 2


def test_catalog_compacts(filled: Filled) -> None:
    done = filled.cli("catalog", "compact", "--json").ok().json[0]
    assert done["folded"] == 3 and done["snapshot"].startswith(snap_prefix(SPEC.name))
    assert filled.cli("usage", "--json").ok().json["namespaces"][0]["chunks"] == 3
