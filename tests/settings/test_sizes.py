"""Settings in bytes: numbers, and sizes as people write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from s3kv.errors import ConfigError
from s3kv.settings import GIB, Settings, TierSettings, load_settings
from s3kv.sim.demo import write_settings

IN_BYTES = [
    (section, name) for section, values in Settings() for name in type(values).model_fields if name.endswith("_bytes")
]
VARIABLE = "S3KV_TIER__CAPACITY_BYTES"
NO_SIZE = "input should be a size such as 64GiB or 512 MB, or a number of bytes"

SIZES = [
    ("64GiB", 64 << 30),
    ("64 GiB", 64 << 30),
    ("64gib", 64 << 30),
    ("64GB", 64 * 10**9),
    ("64G", 64 * 10**9),
    ("512 MB", 512 * 10**6),
    ("512MiB", 512 << 20),
    ("1.5TiB", 3 << 39),
    ("100B", 100),
    ("68719476736", 64 << 30),
    ("1_000", 1000),
]
NO_SIZES = ["64 Gigs", "64Gigs", "GiB", "-1GiB", "1e9", "5.5", "1,000 MiB", "1GiB 512MiB", "64GiB/s", "9" * 400 + "GiB"]


def sentence(message: str, name: str = "tier.capacity_bytes") -> str:
    return f"setting {name} (or S3KV_{name.upper().replace('.', '__')}): {message}"


def refusal(path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    return str(caught.value)


def written(folder: Path, value: object) -> Path:
    path = folder / "s3kv.yaml"
    path.write_text(yaml.safe_dump({"tier": {"capacity_bytes": value}}))
    return path


@pytest.mark.parametrize(("text", "size"), SIZES)
def test_a_size_is_read_from_file_variable_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, size: int
) -> None:
    in_file = tmp_path / "bare.yaml"
    in_file.write_text(f"tier: {{capacity_bytes: {text}}}\n")
    read = [
        load_settings(in_file),
        load_settings(written(tmp_path, text)),
        load_settings(tier={"capacity_bytes": text}),
    ]
    read.append(Settings(tier=TierSettings(capacity_bytes=text)))
    monkeypatch.setenv(VARIABLE, text)
    read.append(load_settings())
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("S3KV_TIER", json.dumps({"capacity_bytes": text}))
    read.append(load_settings())
    assert [each.tier.capacity_bytes for each in read] == [size] * len(read)
    assert {type(each.tier.capacity_bytes) for each in read} == {int}


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert refusal(written(tmp_path, text)) == sentence(NO_SIZE)
    monkeypatch.setenv(VARIABLE, text)
    assert refusal() == sentence(NO_SIZE)


def test_an_empty_size_is_refused_in_a_file_and_an_empty_variable_is_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(written(tmp_path, "")) == sentence(NO_SIZE)
    monkeypatch.setenv(VARIABLE, "")
    assert load_settings().tier.capacity_bytes == 4 * GIB


@pytest.mark.parametrize("value", [0, -5, "0", "-5", "0GiB", "0.1B"])
def test_bounds_hold_for_numbers_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: int | str) -> None:
    assert refusal(written(tmp_path, value)) == sentence("input should be greater than 0")
    monkeypatch.setenv(VARIABLE, str(value))
    assert refusal() == sentence("input should be greater than 0")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5.5, "input should be a valid integer, got a number with a fractional part"),
        ([1], "input should be a valid integer"),
        (None, "input should be a valid integer"),
    ],
)
def test_what_is_no_text_is_judged_as_a_number(tmp_path: Path, value: object, message: str) -> None:
    assert refusal(written(tmp_path, value)) == sentence(message)


@pytest.mark.parametrize(("section", "name"), IN_BYTES)
def test_every_setting_in_bytes_takes_sizes(monkeypatch: pytest.MonkeyPatch, section: str, name: str) -> None:
    variable = f"S3KV_{section}__{name}".upper()
    monkeypatch.setenv(variable, "3 MiB")
    section_read = getattr(load_settings(), section)
    assert getattr(section_read, name) == 3 << 20
    with pytest.raises(ValidationError, match="frozen"):
        setattr(section_read, name, 1)
    monkeypatch.setenv(variable, "3 Megs")
    assert refusal() == sentence(NO_SIZE, f"{section}.{name}")


def test_settings_in_bytes_are_found() -> None:
    assert {("tier", "capacity_bytes"), ("save", "ring_max_bytes"), ("collect", "max_bytes")} <= {*IN_BYTES}


def test_sizes_are_written_as_numbers(tmp_path: Path) -> None:
    settings = load_settings(tier={"capacity_bytes": "64GiB"}, collect={"max_bytes": "1TB"})
    write_settings(settings, tmp_path / "other.yaml")
    other = yaml.safe_load((tmp_path / "other.yaml").read_text())
    assert other["tier"] == {"capacity_bytes": 64 << 30} and other["collect"] == {"max_bytes": 10**12}
    assert load_settings(tmp_path / "other.yaml") == settings
    assert json.loads(settings.model_dump_json())["tier"]["capacity_bytes"] == 64 << 30
