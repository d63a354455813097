"""Policy park: promises over blocks that storage has and that are on their way.

A promise is kept by a lease once every one of its blocks is resident. Until then it holds nothing, so a request that
waits cannot fill the tier; blocks that were evicted meanwhile are fetched again. A promise whose blocks are gone from
storage, or corrupt there, has failed, and is never reported kept (the stated exception to invariant 1). What merely
takes longer (a full tier, a store that is away) is waited for: to fail costs a request, since nobody takes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from s3kv.tier.block import Match

PROMISE_BIT = 1 << 62
"""Leases with this bit are promises; the directory's own ids stay far below it."""


@dataclass(slots=True)
class Promise:
    hashes: Sequence[bytes]
    owner: Hashable
    readers: dict[Hashable, Hashable]
    lease: int = 0
    slots: list[int] = field(default_factory=list)


class Promises:
    """`match` pins a chain's resident prefix for these readers. `coming` starts what is missing of blocks, and says
    whether it will be worth asking for the first of them again. `kept` is told the blocks of each promise once it is.
    """

    def __init__(
        self,
        match: Callable[[Sequence[bytes], dict[Hashable, Hashable]], Match],
        release: Callable[[int, Hashable | None], bool],
        coming: Callable[[Sequence[bytes]], bool],
        kept: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._match = match
        self._release = release
        self._coming = coming
        self._kept = kept
        self._promises: dict[int, Promise] = {}
        self._last = PROMISE_BIT

    def make(self, hashes: Sequence[bytes], owner: Hashable, readers: dict[Hashable, Hashable]) -> int:
        self._last += 1
        self._promises[self._last] = Promise(hashes, owner, readers)
        return self._last

    def state(self, identity: int) -> tuple[bool, bool, list[int]]:
        """(ready, failed, slots)"""
        promise = self._promises.get(identity)
        if promise is None:
            return False, True, []
        if not promise.lease:
            found = self._match(promise.hashes, promise.readers)
            if len(found.slots) == len(promise.hashes):
                promise.lease, promise.slots = found.lease_id, found.slots
                self._kept(promise.hashes)
            else:
                if found.lease_id:
                    self._release(found.lease_id, None)
                if not self._coming(promise.hashes[len(found.slots) :]):
                    return False, True, []
        return bool(promise.lease), False, promise.slots

    def release(self, identity: int, reader: Hashable | None) -> None:
        promise = self._promises.get(identity)
        if promise is None:
            return
        if promise.lease:
            self._release(promise.lease, reader)
        promise.readers = {} if reader is None else {k: v for k, v in promise.readers.items() if k != reader}
        if not promise.readers:
            del self._promises[identity]

    def holder_gone(self, holder: Hashable) -> None:
        """A promise goes with its engine's leader, or once it is a lease, whose shares the directory ends, with the
        last rank that has one."""
        for identity, promise in list(self._promises.items()):
            promise.readers = {reader: each for reader, each in promise.readers.items() if each != holder}
            if not promise.readers or (promise.owner == holder and not promise.lease):
                del self._promises[identity]

    def __len__(self) -> int:
        return len(self._promises)
