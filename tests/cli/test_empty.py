"""An option with nothing in it, as of a shell variable that was not set, is not an option that was left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3kv_cli.main import app
from support.command import Cli
from support.places import Filled
from typer.main import get_command

ARGUMENTS = {"inspect": ("format.json",), "warm": ("prompts.txt",)}


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
    for name, child in (children or {}).items():
        yield from leaves(child, (*path, name))


def takes_text(parameter: Any) -> bool:
    return parameter.param_type_name == "option" and "=" not in str(parameter.metavar) and not parameter.is_flag


def test_no_command_takes_an_empty_option(tmp_path: Path) -> None:
    """Nothing is opened: there is no store, and no agent, that these could do anything to."""
    cli = Cli("--store", "s3://my-kv/p", "--endpoint", "http://127.0.0.1:9", "--set", "store.retries=0")
    arguments = {**ARGUMENTS, "fingerprint": (str(tmp_path),)}
    tried = 0
    for path, command in leaves(get_command(app)):
        for option in (parameter.opts[0] for parameter in command.params if takes_text(parameter)):
            ran = cli(*path, *arguments.get(" ".join(path), ()), f"{option}=")
            assert ran.code == 2 and option in ran.err, f"{path} {option}: {ran.err}"
            tried += 1
    assert tried > 150
    for option in ("--config", "--store", "--region", "--endpoint", "--profile"):
        ran = Cli()(option, "", "bucket", "list")
        assert ran.code == 2 and option in ran.err


@pytest.mark.parametrize(
    "command",
    [
        ("bucket", "delete", "--namespace", "", "--yes"),
        ("bucket", "delete", "--store", "", "--everything", "--yes"),
        ("--store", "", "bucket", "delete", "--everything", "--yes"),
        ("gc", "--namespace", "", "--max-bytes", "1", "--grace", "0s", "--yes"),
        ("gc", "--max-bytes", "", "--orphans", "--grace", "0s", "--yes"),
    ],
    ids=" ".join,
)
def test_nothing_is_deleted_for_an_empty_option(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("S3KV_STORE__URL", filled.place.settings.url)
    monkeypatch.setenv("S3KV_COLLECT__MAX_BYTES", "1")
    before = filled.place.keys()
    ran = Cli()(*command)
    assert ran.code == 2 and "is empty" in ran.err
    assert filled.place.keys() == before
