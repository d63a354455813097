"""Run by an interpreter that has LMCache: puts and gets whole chunks through its S3 connector, on command.

    python lmcache_driver.py HOST:PORT CHUNKS AT_ONCE ACCESS_KEY SECRET_KEY

Reads lines `put`, `get` or `quit`; answers each with a line of JSON: wall and CPU seconds of this process, and the
bytes moved. A chunk is 256 tokens of 32 layers of 8 KV heads of 128 channels in bf16: 32 MiB.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.s3_connector import S3Connector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

SHAPE = (32, 2, 256, 8, 128)


class Driver:
    def __init__(self, endpoint: str, chunks: int, at_once: int, loop: asyncio.AbstractEventLoop) -> None:
        extra = {"save_chunk_meta": False}
        config = LMCacheEngineConfig.from_defaults(chunk_size=256, max_local_cpu_size=2.0, extra_config=extra)
        metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.bfloat16, SHAPE)
        self._backend = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._connector = S3Connector(
            f"s3://{endpoint}", loop, self._backend, 64, False, "us-east-1", False, True,
            *sys.argv[4:6],
        )  # fmt: skip
        self._keys = [CacheEngineKey("m", 1, 0, number, torch.bfloat16) for number in range(1, chunks + 1)]
        self._at_once = at_once
        self._objects = [self._allocate() for _ in self._keys]
        for number, each in enumerate(self._objects):
            each.tensor.fill_(number + 1)

    def _allocate(self) -> Any:
        connector = self._connector
        made = self._backend.allocate(connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt)
        assert made is not None
        return made

    async def run(self, work: str) -> int:
        places = asyncio.Semaphore(self._at_once)

        async def one(number: int) -> int:
            async with places:
                if work == "put":
                    await self._connector._put(self._keys[number], self._objects[number])
                    return int(self._objects[number].get_size())
                found = await self._connector.get(self._keys[number])
                assert found is not None, "the chunk did not come"
                assert float(found.tensor.flatten()[-1]) == number + 1
                size = int(found.get_size())
                found.ref_count_down()
                return size

        return sum(await asyncio.gather(*(one(number) for number in range(len(self._keys)))))


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    loop = asyncio.new_event_loop()
    driver = Driver(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), loop)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        cpu, wall = time.process_time(), time.perf_counter()
        moved = loop.run_until_complete(driver.run(line.strip()))
        answer = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "bytes": moved}
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # the CRT's threads are not waited for


if __name__ == "__main__":
    main()
