"""Texts as mounted secrets, `echo` and YAML leave them: with a line break at the end, or broken."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr, ValidationError
from support.command import Cli

from s3kv.errors import ConfigError
from s3kv.settings import Settings, StoreSettings, load_settings

NAMES = ["url", "region", "endpoint", "profile", "access_key_id", "secret_access_key", "session_token"]
PLAIN = {"url": "s3://hush-bucket/p", "endpoint": "https://hush"}


def plain(value: Any) -> Any:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
@pytest.mark.parametrize("name", NAMES)
def test_one_line_break_at_the_end_is_no_part_of_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, end: str
) -> None:
    text = PLAIN.get(name, "hush")
    path = tmp_path / "s3kv.yaml"
    path.write_text(yaml.safe_dump({"store": {name: text + end}}))
    read = [load_settings(path), load_settings(store={name: text + end})]
    monkeypatch.setenv(f"S3KV_STORE__{name.upper()}", text + end)
    read += [load_settings(), load_settings(store={"retries": 1})]
    assert [plain(getattr(settings.store, name)) for settings in read] == [text] * 4


@pytest.mark.parametrize("broken", ["{}\n\n", "hu\n{}", "\n{}", "{}\t", "{}\x7f"])
@pytest.mark.parametrize("name", NAMES)
def test_control_characters_are_refused_by_name_without_the_text(name: str, broken: str) -> None:
    text = broken.format(PLAIN.get(name, "hush"))
    with pytest.raises(ConfigError) as caught:
        load_settings(store={name: text})
    assert str(caught.value) == (
        f"setting store.{name} (or S3KV_STORE__{name.upper()}): must hold no control characters, such as a line break"
    )
    assert "hush" not in "".join(traceback.format_exception(caught.value)).replace("test_text", "")


def test_no_validation_error_shows_what_it_was_given() -> None:
    for model, values in (
        (StoreSettings, {"secret_access_key": "hush\t"}),
        (Settings, {"store": {"region": "hush\t"}}),
    ):
        with pytest.raises(ValidationError) as caught:
            model.model_validate(values)
        assert "hush" not in str(caught.value)


def test_the_commands_say_so_too(tmp_path: Path) -> None:
    path = tmp_path / "s3kv.yaml"
    path.write_text("store:\n  session_token: |\n    hush\n    hush\n")
    path.chmod(0o600)
    ran = Cli("--config", str(path))("config", "check")
    assert ran.code == 1 and "store.session_token" in ran.err and "hush" not in ran.out + ran.err
    path.write_text("store:\n  url: memory://x\n  session_token: |\n    hush\n")
    assert load_settings(path).store.session_token == SecretStr("hush")
