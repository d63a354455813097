"""Settings files and variables as people leave them."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from support.command import Cli

from s3kv.catalog.index import Index
from s3kv.errors import ConfigError
from s3kv.format.marker import encode_format
from s3kv.settings import AgentSettings, Settings, StoreSettings, load_settings
from s3kv.store.local import LocalStore


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "s3kv.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("text", ["", "# nothing\n", "store:\ntier:\n#  capacity_bytes: 1\n", "---\n"])
def test_a_file_or_section_without_settings_changes_nothing(tmp_path: Path, text: str) -> None:
    assert load_settings(written(tmp_path, text)) == Settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("store:\n\turl: x\n", "line 2"),
        ("store: 5\n", "section store must hold settings by name"),
        ("- a\n", "must hold a mapping of sections"),
        ("stroe: {url: x}\n", "unknown setting stroe"),
        ("store: {urll: x}\n", "unknown setting store.urll"),
        ("store: {retries: many}\n", "setting store.retries"),
        ("agent: {metrics_port: 99999}\n", "setting agent.metrics_port"),
        ("load: {wait_cap_ms: .nan}\n", "setting load.wait_cap_ms"),
        (b"\xff\xfe\x00", "not valid YAML"),
        ("1: {a: b}\n", "unknown setting 1 in "),
        ("on: {a: b}\n", "unknown setting True in "),
        ("stoer:\n", "unknown setting stoer in "),
        ("stoer: {}\n", "unknown setting stoer in "),
        ("Store: {url: x}\n", "unknown setting Store in "),
        ("store: {1: x}\n", "setting store.1 (or "),
        ("identity: {extra: {1: x}}\n", "setting identity.extra.1 (or "),
        ("store: {region: 2026-13-45}\n", "not valid YAML: it has a date or number that is none"),
        ("store: {retries: !!int many}\n", "not valid YAML: it has a date or number that is none"),
        ("store: {tls_verify: !!bool perhaps}\n", "not valid YAML: it has a date or number that is none"),
        ("store: " + "[" * 5000, "not valid YAML: it is nested too deeply"),
        ("store: &a {url: x, region: *a}\n", "setting store.region"),
        ("store: {request_timeout_s: .inf}\n", "setting store.request_timeout_s"),
        ("store: {connect_timeout_s: 1e+300}\n", "setting store.connect_timeout_s"),
        ("agent: {call_timeout_s: 3e+6}\n", "setting agent.call_timeout_s"),
        ("load: {wait_cap_ms: .inf}\n", "setting load.wait_cap_ms"),
        ("store: {max_connections: 3000000000}\n", "setting store.max_connections"),
        ("catalog: {map_bytes: 100EiB}\n", "setting catalog.map_bytes"),
        ("catalog: {map_bytes: 4KiB}\n", "setting catalog.map_bytes"),
        ("tier: {capacity_bytes: 100EiB}\n", "setting tier.capacity_bytes"),
    ],
)
def test_what_a_file_may_not_hold_is_one_sentence_that_names_it(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("secret", ["hush: x", "*hush", "!hush x", "!hush!it x", "!!int hush", "&hush &hush x"])
def test_a_broken_file_does_not_show_its_secrets(tmp_path: Path, secret: str) -> None:
    path = written(tmp_path, f"store:\n  secret_access_key: {secret}\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert "hush" not in str(caught.value).replace(str(path), "") and str(path) in str(caught.value)
    assert "line 2" in str(caught.value) or "!!int" in secret


def test_a_variable_for_a_whole_section_is_json_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3KV_STORE", '{"url": "memory://x"}')
    assert load_settings().store.url == "memory://x"
    monkeypatch.setenv("S3KV_STORE", "s3://bucket")
    with pytest.raises(ConfigError, match=r"^S3KV_STORE must hold a JSON object"):
        load_settings()
    monkeypatch.setenv("S3KV_STORE", "[" * 100_000)
    with pytest.raises(ConfigError, match=r"^S3KV_STORE must hold a JSON object"):
        load_settings()


def test_a_variable_for_a_mapping_is_json_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3KV_STORE", '{"url": "memory://x"}')
    monkeypatch.setenv("S3KV_IDENTITY__EXTRA", '{"a": "b"}')
    monkeypatch.setenv("s3kv_identity__adapters", "x")
    with pytest.raises(ConfigError, match=r"^s3kv_identity__adapters must hold a JSON object, or be unset$"):
        load_settings()
    monkeypatch.setenv("s3kv_identity__adapters", "5")
    with pytest.raises(ConfigError, match=r"^setting identity\.adapters \(or S3KV_IDENTITY__ADAPTERS\): input should"):
        load_settings()


def test_a_variable_that_names_no_setting_is_said_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("S3KV_PORT", "tcp://10.0.0.1:80")  # as Kubernetes sets for a service named s3kv
    monkeypatch.setenv("S3KV_SERVICE_HOST", "10.0.0.1")
    with caplog.at_level(logging.WARNING):
        load_settings()
        assert caplog.messages == []
        monkeypatch.setenv("S3KV_STROE__URL", "s3://bucket")
        load_settings()
    assert caplog.messages == ["environment variable S3KV_STROE__URL names no setting and is ignored"]
    monkeypatch.setenv("S3KV_STORE__URLL", "s3://bucket")
    with pytest.raises(ConfigError, match=r"unknown setting store\.urll"):
        load_settings()


def test_settings_load_where_nothing_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert AgentSettings().socket.name == "agent.sock"
    assert StoreSettings().url.startswith("file:///")


def test_ids_of_adapters_may_be_written_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "identity: {adapters: {0: zero, 7: seven, 'eight': eight}}\n")
    assert load_settings(path).identity.adapters == {"0": "zero", "7": "seven", "eight": "eight"}
    monkeypatch.setenv("S3KV_IDENTITY__ADAPTERS", '{"7": "other"}')
    assert load_settings().identity.adapters == {"7": "other"}


WHERE: dict[str, tuple[str, Any, Any, Any]] = {
    "store.url": ("memory://env", "memory://file", "memory://argument", "memory://env"),
    "store.retries": ("2", 1, 3, 2),
    "store.secret_access_key": ("env", "file", "argument", SecretStr("env")),
    "agent.socket": ("/env", "/file", "/argument", Path("/env")),
    "tier.capacity_bytes": ("2MiB", "1MiB", "3MiB", 2 << 20),
    "identity.extra": ('{"a": "env"}', {"a": "file"}, {"a": "argument"}, {"a": "env"}),
}
"""Name -> its text in the environment, its value in a file, as an argument, and what the environment's reads as."""


@pytest.mark.parametrize("name", WHERE)
@pytest.mark.parametrize("whole_section", [False, True])
def test_arguments_win_over_variables_which_win_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, whole_section: bool
) -> None:
    in_variable, in_file, argument, read = WHERE[name]
    section, key = name.split(".")
    path = tmp_path / "s3kv.json"
    path.write_text(json.dumps({section: {key: in_file}}))

    def value(settings: Settings) -> Any:
        return getattr(getattr(settings, section), key)

    assert value(load_settings(path)) == value(Settings(**{section: {key: in_file}}))
    if whole_section:
        plain = json.loads(in_variable) if in_variable.startswith("{") else in_variable
        monkeypatch.setenv(f"S3KV_{section}".upper(), json.dumps({key: plain}))
    else:
        monkeypatch.setenv(f"S3KV_{section}__{key}".upper(), in_variable)
    assert value(load_settings(path)) == read
    given = {section: {key: argument}}
    assert value(load_settings(path, **given)) == value(Settings(**given)) != read


def test_an_argument_leaves_what_others_set_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "store: {region: file, retries: 1, profile: file}\nsave: {min_priority: 7}\n")
    monkeypatch.setenv("S3KV_STORE__URL", "memory://env")
    monkeypatch.setenv("S3KV_STORE__REGION", "env")
    settings = load_settings(path, store={"url": "memory://argument", "profile": None}, tier={})
    store = settings.store
    assert (store.url, store.region, store.retries, store.profile) == ("memory://argument", "env", 1, None)
    assert store.model_fields_set == {"url", "region", "retries", "profile"}
    assert settings.save.min_priority == 7
    assert type(settings) is Settings


def test_an_argument_that_is_a_mapping_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3KV_IDENTITY__ADAPTERS", '{"7": "env", "8": "env"}')
    assert load_settings(identity={"adapters": {7: "argument"}}).identity.adapters == {"7": "argument"}


def test_a_command_works_on_the_store_that_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("env", "argument"):
        LocalStore(tmp_path / name)
        (tmp_path / name / "format.json").write_bytes(encode_format())
    monkeypatch.setenv("S3KV_STORE__URL", f"file://{tmp_path}/env")
    cli = Cli("--store", f"file://{tmp_path}/argument")
    shown = cli("config", "show", "--json").ok().json["settings"]["store.url"]
    assert shown == {"value": f"file://{tmp_path}/argument", "source": "command line"}
    cli("bucket", "delete", "--everything", "--yes").ok()
    assert (tmp_path / "env" / "format.json").exists() and not (tmp_path / "argument" / "format.json").exists()


def test_settings_of_their_own_arguments_are_not_changed_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3KV_STORE__URL", "memory://env")
    monkeypatch.setenv("S3KV_STORE__REGION", "env")
    for settings in (
        Settings(store=StoreSettings(url="memory://argument")),
        Settings.model_validate({"store": {"url": "memory://argument"}}),
        Settings(**{"store": {"url": "memory://argument"}}),
    ):
        assert settings.store.url == "memory://argument"
    assert Settings().store.url == "memory://env"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"stroe": {"url": "x"}}, "unknown setting stroe"),
        ({"store": {"urll": "x"}}, r"unknown setting store\.urll \(or S3KV_STORE__URLL\)"),
        ({"store": {"retries": "many"}}, r"setting store\.retries \(or S3KV_STORE__RETRIES\): input should be"),
    ],
)
def test_what_an_argument_may_not_be_is_said_with_its_name(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        load_settings(**overrides)


def test_the_smallest_and_largest_index_can_be_opened(tmp_path: Path) -> None:
    for size in ("64KiB", "64TiB"):
        map_bytes = load_settings(catalog={"map_bytes": size}).catalog.map_bytes
        Index.open(tmp_path / size, "x", map_bytes=map_bytes).close()
