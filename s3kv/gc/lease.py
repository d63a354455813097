"""One collector at a time: a lease object with a fencing epoch.

No two clocks are ever compared. A holder renews by `put_if_match`, which changes the object's etag; another may take
the lease over only after it has itself watched the same etag for the whole `lease_s`. Every take-over raises the epoch,
and a holder that was stalled finds out at its next renewal, because its etag is not there any more (`LeaseLost`).

On a store without atomic `put_if_match` the lease is only advisory. Two collectors at once are then still harmless:
deleting is idempotent, and each one checks the catalog before each batch.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace

from s3kv.errors import AlreadyExists, CorruptData, NotFound, PreconditionFailed, S3kvError, StoreError
from s3kv.format.keys import lease_key
from s3kv.format.limits import U64
from s3kv.store import Store

MAX_LEASE_BYTES = 64 << 10
_WATCH_STEPS = 10


class LeaseHeld(S3kvError):
    """Somebody else renews the lease. Next: try later; nothing was changed."""


class LeaseLost(S3kvError):
    """Somebody else took the lease over. Next: stop at once."""


@dataclass(frozen=True, slots=True)
class LeaseState:
    """The object's content. `holder` is "" when it is free. `beat` makes every renewal differ.

    `pending_us`: when the oldest collection whose objects may not all be deleted yet published its records; 0 for none.
    """

    epoch: int
    holder: str
    beat: int = 0
    pending_us: int = 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> LeaseState:
        """Raises CorruptData."""
        try:
            fields = json.loads(data)
            numbers = {name: fields[name] for name in ("epoch", "beat", "pending_us")}
            if not all(type(value) is int and 0 <= value <= U64 for value in numbers.values()):
                raise ValueError("number out of range")
            return cls(holder=str(fields["holder"])[:200], **numbers)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptData("lease object is not a lease") from error


class Lease:
    """A held lease. Not thread-safe."""

    def __init__(self, store: Store, key: str, state: LeaseState, etag: str) -> None:
        self._store = store
        self._key = key
        self._etag = etag
        self.state = state

    @property
    def epoch(self) -> int:
        return self.state.epoch

    async def renew(self, *, pending_us: int | None = None) -> None:
        """Raises LeaseLost when it is somebody else's now. Must be called well within `lease_s` of the last time."""
        pending = self.state.pending_us if pending_us is None else pending_us
        await self._replace(replace(self.state, beat=self.state.beat + 1, pending_us=pending))

    async def release(self) -> None:
        """Free it for the next one at once. A lost lease is nothing to release."""
        with suppress(LeaseLost, StoreError):
            await self._replace(replace(self.state, holder="", beat=self.state.beat + 1))

    async def _replace(self, state: LeaseState) -> None:
        try:
            self._etag = await self._store.put_if_match(self._key, state.encode(), self._etag)
        except PreconditionFailed as error:
            # The answer to our own write may have been lost and the write sent again: then it is ours still.
            found, etag = await _read(self._store, self._key)
            if found != state:
                raise LeaseLost(
                    "another collector took over (its lease in the bucket says so): this one stops"
                ) from error
            self._etag = etag
        self.state = state


class Heartbeat:
    """Called within long work, often: keeps the lease, and raises LeaseLost when it is somebody else's now."""

    def __init__(self, lease: Lease, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease = lease
        self._every_s = lease_s / 3
        self._clock = clock
        self._renewed = clock()

    async def __call__(self) -> None:
        if self._clock() - self._renewed >= self._every_s:
            await self._lease.renew()
            self._renewed = self._clock()


async def acquire(
    store: Store, name: str, holder: str, *, lease_s: float, sleep: Callable[[float], Awaitable[None]]
) -> Lease:
    """Takes the lease: at once when it is free, else after `lease_s` without a sign of its holder.

    Raises LeaseHeld when the holder renews it meanwhile, or somebody else was faster.
    """
    key = lease_key(name)
    state = LeaseState(epoch=1, holder=holder)
    try:
        return Lease(store, key, state, await store.put_if_absent(key, state.encode()))
    except AlreadyExists:
        pass
    found, etag = await _read(store, key)
    if found.holder:
        found, etag = await _watch(store, key, found, etag, lease_s, sleep)
    state = LeaseState(epoch=found.epoch + 1, holder=holder, pending_us=found.pending_us)
    try:
        return Lease(store, key, state, await store.put_if_match(key, state.encode(), etag))
    except PreconditionFailed as error:
        raise LeaseHeld("another collector has just begun: try again later") from error


async def _watch(
    store: Store, key: str, found: LeaseState, etag: str, lease_s: float, sleep: Callable[[float], Awaitable[None]]
) -> tuple[LeaseState, str]:
    for _ in range(_WATCH_STEPS):
        await sleep(lease_s / _WATCH_STEPS)
        now, now_etag = await _read(store, key)
        if not now.holder:
            return now, now_etag
        if now_etag != etag:
            raise LeaseHeld(f"another collector is at work ({now.holder}): try again later")
    return found, etag


async def _read(store: Store, key: str) -> tuple[LeaseState, str]:
    try:
        data, etag = await store.get_with_etag(key, MAX_LEASE_BYTES)
    except NotFound as error:
        raise LeaseHeld("the lease object went away meanwhile: try again") from error
    try:
        return LeaseState.decode(data), etag
    except CorruptData:
        return LeaseState(epoch=0, holder="unreadable"), etag  # watched like any other, then replaced


@asynccontextmanager
async def held(
    store: Store, name: str, holder: str, *, lease_s: float, sleep: Callable[[float], Awaitable[None]]
) -> AsyncIterator[Lease]:
    """`acquire`, and release at the end."""
    lease = await acquire(store, name, holder, lease_s=lease_s, sleep=sleep)
    try:
        yield lease
    finally:
        await lease.release()
