"""The documentation of the commands is what they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from s3kv_cli.main import app
from typer.main import get_command

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_transcripts_are_current() -> None:
    """When this fails: run `python docs/make_cli.py` and look at what changed."""
    ran = subprocess.run(
        [sys.executable, "docs/make_cli.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_command_has_a_transcript() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    missing = [
        " ".join([*path])
        for path in _leaves(get_command(app), ())
        if path != ("demo",) and f"$ s3kv {' '.join(path)}" not in text
    ]
    assert not missing


def _leaves(command: object, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    children = getattr(command, "commands", None)
    if children is None:
        return [path]
    return [leaf for name, child in children.items() for leaf in _leaves(child, (*path, name))]
