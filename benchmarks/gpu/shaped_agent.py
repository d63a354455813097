"""An agent whose store answers like a bucket: a first-byte latency, and a cap on bytes a second over all connections.

`python -m benchmarks.gpu.shaped_agent LATENCY_S BYTES_PER_S` with S3KV_CONFIG set; 0 means no limit. The store is the
one of the settings (a folder in memory); reads alone are shaped.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from s3kv.agent.service import Agent
from s3kv.settings import load_settings
from s3kv.store.opening import open_store


class ShapedStore:
    """Reads wait for the first byte and for their share of the cap; everything else passes through."""

    def __init__(self, inner: Any, latency_s: float, bytes_per_s: float) -> None:
        self._inner = inner
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> None:
        await self._shape(sum(length for _, length in ranges), self._inner.get_ranges(key, ranges, outs))

    async def get_into(self, key: str, out: memoryview, offset: int = 0) -> Any:
        return await self._shape(len(out), self._inner.get_into(key, out, offset))

    async def _shape(self, nbytes: int, call: Any) -> Any:
        now = time.monotonic()
        done_at = now + self._latency_s
        if self._bytes_per_s:
            self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
            done_at = self._free_at + self._latency_s
        result = await call
        await asyncio.sleep(max(0.0, done_at - time.monotonic()))
        return result


async def main(latency_s: float, bytes_per_s: float) -> None:
    settings = load_settings()
    await Agent(settings, store=ShapedStore(open_store(settings.store), latency_s, bytes_per_s)).run()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), float(sys.argv[2])))
