"""Trying every call that s3kv makes of a store under a scratch key, and saying what does not work and what to do.

Scratch keys are removed at the end, also when a check fails or is cancelled. Where the credentials may not delete, the
bucket's lifecycle rule for `s3kv-scratch/` removes them.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from s3kv.errors import (
    AlreadyExists,
    BreakerOpen,
    CorruptData,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    StoreError,
    Unsupported,
)
from s3kv.settings import StoreSettings
from s3kv.store.base import Store
from s3kv.store.failures import describe_failure, named
from s3kv.store.scratch import remove_scratch

Grade = Literal["ok", "warn", "fail", "skip"]
SKEW_WARN_S, SKEW_FAIL_S = 30.0, 600.0
"""S3 refuses signatures 15 minutes off; the catalog distrusts stamps by catalog.max_clock_skew_s."""
LATENCY_TRIES = 5
BULK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried. `remedy` is empty when nothing is to be done."""

    name: str
    grade: Grade
    detail: str
    remedy: str = ""


class Probe:
    """One examination of one store. `prefix` ends with "/" and holds nothing else."""

    def __init__(
        self,
        store: Store,
        settings: StoreSettings,
        prefix: str,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._settings = settings
        self._key = prefix + "object"
        self._keys = [self._key, self._key + "-bulk", self._key + "-once"]
        self._prefix = prefix
        self._clock = clock
        self._wall_clock = wall_clock
        self.checks: list[Check] = []

    async def run(self) -> list[Check]:
        """Every check, in order; when the store cannot even be written to, the later ones are skipped."""
        try:
            if await self._try("write", self._write):
                await self._try("read", self._read)
                await self._try("read a range", self._read_range)
                await self._try("list", self._list)
                await self._try("conditional write", self._conditional)
                await self._try("replace if unchanged", self._match)
                await self._try("clock", self._skew)
                await self._try("first byte", self._latency)
                await self._try("throughput", self._throughput)
                await self._try("delete", self._delete)
        finally:
            await remove_scratch(self._store, self._keys)
        return self.checks

    async def _try(self, name: str, work: Callable[[], Awaitable[Check]]) -> bool:
        try:
            check = await work()
        except BreakerOpen:
            check = Check(name, "skip", "not tried: the store has failed repeatedly")
        except (StoreError, CorruptData) as error:
            check = Check(name, "fail", describe_failure(error, self._settings), _remedy(name))
        self.checks.append(check)
        return check.grade in ("ok", "warn")

    async def _write(self) -> Check:
        await self._store.put(self._key, b"s3kv doctor")
        return Check("write", "ok", "an object can be put: credentials, region and endpoint are right")

    async def _read(self) -> Check:
        if await self._store.get(self._key, 1024) != b"s3kv doctor":
            raise CorruptData("the store gave back other bytes than were put")
        await self._store.head(self._key)
        with suppress(NotFound):
            await self._store.head(self._key + "-absent")
            raise CorruptData("the store says that an object exists which was never put")
        return Check("read", "ok", "get and head work; a missing key is told from a refused one")

    async def _read_range(self) -> Check:
        out = bytearray(6)
        await self._store.get_into(self._key, memoryview(out), 5)
        if bytes(out) != b"doctor":
            raise CorruptData("a range request gave other bytes")
        return Check("read a range", "ok", "range requests work")

    async def _list(self) -> Check:
        seen = [meta.key async for page in self._store.list(self._prefix) for meta in page]
        if self._key not in seen:
            raise CorruptData("an object that was just put is not listed")
        return Check("list", "ok", "listing works and shows what was just put")

    async def _conditional(self) -> Check:
        key = self._key + "-once"
        name = "conditional write"
        await self._store.put_if_absent(key, b"first")
        try:
            await self._store.put_if_absent(key, b"second")
        except AlreadyExists:
            atomic = self._store.capabilities.conditional_put
            if atomic is not False:
                return Check(name, "ok", "If-None-Match is honoured")
        setting = named("conditional_put")
        remedy = f"two writers may both succeed: harmless for chunks; set {setting} to none to save a try"
        return Check(name, "warn", "the store ignores or refuses If-None-Match", remedy)

    async def _match(self) -> Check:
        name = "replace if unchanged"
        etag = await self._store.put(self._key, b"s3kv doctor")
        try:
            await self._store.put_if_match(self._key, b"s3kv doctor", etag)
            await self._store.put_if_match(self._key, b"s3kv doctor", '"0123456789abcdef0123456789abcdef"')
        except PreconditionFailed:
            if self._store.capabilities.conditional_match is not False:
                return Check(name, "ok", "If-Match is honoured: leases are exact")
        except Unsupported:
            pass
        remedy = "run s3kv gc from one place only: its lease cannot keep a second one out on this store"
        return Check(name, "warn", "the store ignores or refuses If-Match", remedy)

    async def _skew(self) -> Check:
        before = self._wall_clock()
        await self._store.put(self._key, b"s3kv doctor")
        modified = (await self._store.head(self._key)).modified
        after = self._wall_clock()
        # The store's stamp has whole seconds.
        skew = max(before - modified - 1.0, modified - after, 0.0)
        text = "this clock and the store's agree" if skew < SKEW_WARN_S else f"the clocks differ by {skew:.0f} s"
        grade: Grade = "ok" if skew < SKEW_WARN_S else "warn" if skew < SKEW_FAIL_S else "fail"
        return Check("clock", grade, text, "" if grade == "ok" else "synchronise this machine's clock (NTP)")

    async def _latency(self) -> Check:
        times = []
        for _ in range(LATENCY_TRIES):
            began = self._clock()
            await self._store.get_into(self._key, memoryview(bytearray(1)))
            times.append(self._clock() - began)
        median = statistics.median(times)
        slow = median > 0.2
        remedy = "use a bucket in this region, or raise load.wait_cap_ms" if slow else ""
        text = f"{median * 1000:.1f} ms (median of {LATENCY_TRIES})"
        return Check("first byte", "warn" if slow else "ok", text, remedy)

    async def _throughput(self) -> Check:
        key = self._key + "-bulk"
        body = bytes(BULK_BYTES)
        began = self._clock()
        await self._store.put(key, body)
        put_s = self._clock() - began
        began = self._clock()
        await self._store.get_into(key, memoryview(bytearray(BULK_BYTES)))
        get_s = self._clock() - began
        rates = [BULK_BYTES / max(seconds, 1e-9) / 1e6 for seconds in (put_s, get_s)]
        text = f"put {rates[0]:.0f} MB/s, get {rates[1]:.0f} MB/s on one connection (s3kv bench store says more)"
        return Check("throughput", "ok", text)

    async def _delete(self) -> Check:
        try:
            failures = await self._store.delete(self._keys)
            if failures:
                raise failures[0].error
        except PermissionDenied:
            return Check("delete", "warn", "these credentials may not delete", _remedy("may not delete"))
        return Check("delete", "ok", "bulk delete works")


def _remedy(name: str) -> str:
    return {
        "write": "see the sentence on the left; the permissions needed are in docs and in the Terraform module",
        "delete": f"if the store refuses bulk deletes set {named('delete_mode')} to single",
        "may not delete": "right for a node; whoever runs s3kv gc needs s3:DeleteObject",
        "list": "grant s3:ListBucket on the bucket (and the prefix of store.url)",
    }.get(name, "see the sentence on the left")
