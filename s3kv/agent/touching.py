"""Telling the catalog which chunks are in use; collection goes by it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from s3kv.catalog.catalog import Catalog

_TIPS = 65_536


class Touching:
    """`wall_clock` gives seconds since 1970."""

    def __init__(self, catalog: Catalog, wall_clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._wall_clock = wall_clock
        self._touched: OrderedDict[bytes, None] = OrderedDict()

    def soon(self, hashes: Sequence[bytes]) -> None:
        """These blocks of a chain are in use. Told once the loop is through with what it does now: nobody waits."""
        asyncio.get_running_loop().call_soon(self._touch, list(hashes))

    def _touch(self, hashes: list[bytes]) -> None:
        """Once an hour for a chain's end, since the catalog counts hours."""
        hour = int(self._wall_clock() // 3600)
        key = hashes[-1] + hour.to_bytes(4, "little")
        if key in self._touched:
            return
        self._touched[key] = None
        if len(self._touched) > _TIPS:
            self._touched.popitem(last=False)
        self._catalog.touch(dict.fromkeys(place.chunk_id for place in self._catalog.lookup(hashes)))
