"""Stores over the faulty proxy, for the tests of S3 clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from support.faulty_proxy import FaultyProxy, faulty_proxy
from support.opener import Opener
from support.servers import S3Place


@pytest.fixture
def proxy(seaweedfs: str) -> Iterator[FaultyProxy]:
    with faulty_proxy(seaweedfs) as running:
        yield running


@pytest.fixture
async def opened(proxy: FaultyProxy, seaweedfs_place: S3Place) -> AsyncIterator[Opener]:
    opener = Opener(proxy, seaweedfs_place)
    yield opener
    await opener.close()
