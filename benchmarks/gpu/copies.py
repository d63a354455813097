"""Save and load bandwidth of the connector's own copies, by page size, against one large pinned copy in the same run.

Save is the snapshot's gather into the ring plus the copy to slots; both are timed, the copy alone is the claim, since
the gather runs on the forward stream at device bandwidth. Load is slots to scattered pages.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import torch

from s3kv.connector import cuda
from s3kv.connector.cuda import CudaDevice
from s3kv.connector.strips import Copies, Gather, Lane, Strip, numbers
from s3kv.tier.arena import Arena

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE_SIZES = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)
TOTAL = GIB
REPEATS = 9


def timed(work: Callable[[], None], stream: torch.cuda.Stream) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def median_gbs(work: Callable[[], None], stream: torch.cuda.Stream, nbytes: int) -> float:
    work()
    return nbytes / statistics.median(timed(work, stream) for _ in range(REPEATS)) / 1e9


def run(rng: random.Random) -> dict[str, Any]:
    device = CudaDevice(torch.device("cuda", 0))
    stream = torch.cuda.Stream()
    arena = Arena.create(TOTAL // (4 * MIB) * 2, 4 * MIB)
    host = torch.frombuffer(arena.buffer, dtype=torch.uint8)
    host.random_(0, 256)
    refused = device.pin(host.data_ptr(), host.numel())
    limit_host = torch.empty(TOTAL, dtype=torch.uint8, pin_memory=True)
    limit_device = torch.randint(0, 256, (TOTAL,), dtype=torch.uint8, device="cuda")
    rows = []
    for page in PAGE_SIZES:
        count = TOTAL // page
        pool = torch.randint(0, 256, (2 * count, page), dtype=torch.uint8, device="cuda")
        ring = torch.empty((count, page), dtype=torch.uint8, device="cuda")
        slots = Strip.of(host.view(-1, page))
        pages, places = numbers(rng.sample(range(2 * count), count)), numbers(rng.sample(range(slots.rows), count))
        gather = [Gather([Lane.of(Strip.of(pool), Strip.of(ring))], pages.tolist(), 0)]
        scratch = device.scratch(count)
        save = [Copies(slots, places, Strip.of(ring), numbers(range(count)))]
        load = [Copies(Strip.of(pool), pages, slots, places)]

        def one_large(to_host: bool) -> None:
            with torch.cuda.stream(stream):
                if to_host:
                    limit_host.copy_(limit_device, non_blocking=True)
                else:
                    limit_device.copy_(limit_host, non_blocking=True)

        out_limit = median_gbs(lambda: one_large(True), stream, TOTAL)
        in_limit = median_gbs(lambda: one_large(False), stream, TOTAL)
        saved = median_gbs(lambda save=save: device.copy(save, stream), stream, TOTAL)  # type: ignore[misc]
        loaded = median_gbs(lambda load=load: device.copy(load, stream), stream, TOTAL)  # type: ignore[misc]
        gathered = median_gbs(
            lambda gather=gather, scratch=scratch: device.gather(gather, stream, scratch, 0),  # type: ignore[misc]
            stream,
            TOTAL,
        )
        device.gather(gather, stream, scratch, 0)
        device.copy(save, stream)
        before = pool[torch.as_tensor(pages).cuda()].clone()
        torch.cuda.synchronize()
        pool.zero_()
        torch.cuda.synchronize()
        device.copy(load, stream)
        torch.cuda.synchronize()
        right = torch.equal(pool[torch.as_tensor(pages).cuda()], before)
        rows.append(
            {
                "page_bytes": page, "save_gbs": saved, "save_ratio": saved / out_limit, "load_gbs": loaded,
                "load_ratio": loaded / in_limit, "gather_gbs": gathered, "limit_out_gbs": out_limit,
                "limit_in_gbs": in_limit, "bytes_right": right,
            }
        )  # fmt: skip
        print(
            f"page {page // KIB:5d} KiB  save {saved:5.1f} GB/s ({saved / out_limit:.2f} of the limit)  "
            f"load {loaded:5.1f} GB/s ({loaded / in_limit:.2f})  gather {gathered:6.0f} GB/s  right {right}",
            flush=True,
        )
        del pool, ring
    sweep = {}
    for page in (64 * KIB, 256 * KIB):
        count = TOTAL // page
        pool = torch.empty((2 * count, page), dtype=torch.uint8, device="cuda")
        slots = Strip.of(host.view(-1, page))
        pages, places = numbers(rng.sample(range(2 * count), count)), numbers(rng.sample(range(slots.rows), count))
        load = [Copies(Strip.of(pool), pages, slots, places)]
        chosen = cuda._BATCH_LIMIT
        for limit in (32, 64, 128, 256, 512, 1024, 4096):
            cuda._BATCH_LIMIT = limit
            sweep[f"{page // KIB} KiB, {limit} a call"] = median_gbs(
                lambda load=load: device.copy(load, stream), stream, TOTAL
            )  # type: ignore[misc]
        cuda._BATCH_LIMIT = chosen
        del pool
    print("load GB/s by copies a call:", {name: round(value, 1) for name, value in sweep.items()}, flush=True)
    if refused is None:
        device.unpin(host.data_ptr())
    return {
        "pinned": refused or "yes",
        "batched": device._batch is not None,
        "total_bytes": TOTAL,
        "sweep": sweep,
        "rows": rows,
    }
