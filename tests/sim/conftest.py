"""The stand-in interface, and a toy connector that is imported anew under it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from s3kv.sim import install

Toy = Callable[..., None]


@pytest.fixture
def interface() -> Iterator[None]:
    sys.modules.pop("support.toy_connector", None)
    with install("both"):
        yield
    sys.modules.pop("support.toy_connector", None)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Toy:
    """Sets the toy connector's settings; its store is this test's own."""

    def configure(**settings: Any) -> None:
        monkeypatch.setenv("TOY", json.dumps({"store": request.node.name, **settings}))

    configure()
    return configure
