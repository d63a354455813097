from __future__ import annotations

from pathlib import Path

import pytest

from s3kv.errors import ConfigError
from s3kv.identity import fingerprint_model


def checkpoint(folder: Path, *, weights: bytes = b"w" * 5_000_000, config: bytes = b"{}") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_bytes(config)
    return folder


def test_equal_checkpoints_in_different_folders_are_equal(tmp_path: Path) -> None:
    assert fingerprint_model(checkpoint(tmp_path / "a")) == fingerprint_model(checkpoint(tmp_path / "b"))


def test_weights_and_configuration_both_count(tmp_path: Path) -> None:
    whole = fingerprint_model(checkpoint(tmp_path / "a"))
    changed = bytearray(b"w" * 5_000_000)
    changed[2_500_000:3_000_000] = b"x" * 500_000
    assert fingerprint_model(checkpoint(tmp_path / "b", weights=bytes(changed))) != whole
    assert fingerprint_model(checkpoint(tmp_path / "c", config=b'{"rope":1}')) != whole
    assert fingerprint_model(checkpoint(tmp_path / "d", weights=b"w" * 5_000_001)) != whole
    assert fingerprint_model(checkpoint(tmp_path / "e", weights=b"w" * 4_999_999 + b"x")) != whole


def test_a_folder_without_weights_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model weights"):
        fingerprint_model(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        fingerprint_model(tmp_path / "missing")
