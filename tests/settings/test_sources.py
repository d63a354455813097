"""Settings files and variables as people leave them."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest

from s3kv.errors import ConfigError
from s3kv.settings import AgentSettings, Settings, StoreSettings, load_settings


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
    ],
)
def test_what_a_file_may_not_hold_is_one_sentence_that_names_it(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_broken_file_does_not_show_its_secrets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(written(tmp_path, "store:\n  secret_access_key: hush: x\n"))
    assert "hush" not in str(caught.value) and "line 2" in str(caught.value)


def test_a_variable_for_a_whole_section_is_json_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3KV_STORE", '{"url": "memory://x"}')
    assert load_settings().store.url == "memory://x"
    monkeypatch.setenv("S3KV_STORE", "s3://bucket")
    with pytest.raises(ConfigError, match=r"^S3KV_STORE must hold a JSON object"):
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
