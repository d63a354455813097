"""Documents that name tests name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", ["reliability.md", "security.md"])
def test_every_test_and_folder_that_is_named_exists(document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named and not [name for name in named if f"def {name}(" not in tests]
    assert not [path for path in re.findall(r"`((?:tests|benchmarks)/[\w/.-]+)`", text) if not (ROOT / path).exists()]
