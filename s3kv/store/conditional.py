"""Conditional puts on stores that may honour, refuse (501) or silently ignore `If-None-Match` and `If-Match`.

`store.conditional_put` says how it is: `native` trusts the store, `none` never sends the headers, and `auto` finds out
with a scratch object before the first conditional put (up to three small requests for each of the two
headers, once a process, and a delete).

Without native support a conditional put is a head and then a put. Two writers that race may then both succeed. For
chunks and catalog segments that is harmless: their key determines their content (invariant 6). For leases it is not:
`capabilities.conditional_match` is False then, and a collector must not run beside another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Literal

from s3kv.errors import AlreadyExists, NotFound, PreconditionFailed, StoreError, Unsupported
from s3kv.store.base import Body, Capabilities, Store
from s3kv.store.keys import SCRATCH_PREFIX
from s3kv.store.wrapper import StoreWrapper

WRONG_ETAG = '"00000000000000000000000000000000"'
Mode = Literal["auto", "native", "none"]

log = logging.getLogger(__name__)


class ConditionalStore(StoreWrapper):
    """`inner` sends the conditional headers as they are asked for. `name` gives the scratch object's name."""

    def __init__(self, inner: Store, mode: Mode, *, name: Callable[[], str] = lambda: secrets.token_hex(8)) -> None:
        super().__init__(inner)
        known = {"auto": None, "native": True, "none": False}[mode]
        self._absent: bool | None = known
        self._match: bool | None = known
        self._name = name
        self._probing = asyncio.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self._absent, self._match, self._inner.capabilities.start_after)

    async def put_if_absent(self, key: str, body: Body) -> str:
        if self._absent is None:
            await self.detect()
        if self._absent:
            return await self._inner.put_if_absent(key, body)
        try:
            await self._inner.head(key)
        except NotFound:
            return await self._inner.put(key, body)
        raise AlreadyExists(f"object {key} exists")

    async def put_if_match(self, key: str, body: Body, etag: str) -> str:
        if self._match is None:
            await self.detect()
        if self._match:
            return await self._inner.put_if_match(key, body, etag)
        try:
            held = (await self._inner.head(key)).etag
        except NotFound:
            held = None
        if held != etag:
            raise PreconditionFailed(f"object {key} has changed")
        return await self._inner.put(key, body)

    async def detect(self) -> Capabilities:
        """Find out what is not known yet. Raises StoreError when the store cannot say; the next call asks again."""
        async with self._probing:
            if self._absent is None or self._match is None:
                key = f"{SCRATCH_PREFIX}conditional-{self._name()}"
                try:
                    absent = await self._honours_absent(key)
                    match = await self._honours_match(key)
                finally:
                    with contextlib.suppress(StoreError):
                        await self._inner.delete([key])
                self._absent, self._match = absent, match
                if not (absent and match):
                    log.warning(
                        "the store does not honour conditional puts (If-None-Match: %s, If-Match: %s); "
                        "two writers of one object may both succeed",
                        "yes" if absent else "no",
                        "yes" if match else "no",
                    )
        return self.capabilities

    async def _honours_absent(self, key: str) -> bool:
        try:
            await self._inner.put_if_absent(key, b"1")
        except (Unsupported, AlreadyExists):  # refused, or refused even for a name nobody has
            return False
        try:
            await self._inner.put_if_absent(key, b"2")
        except AlreadyExists:
            return True
        return False

    async def _honours_match(self, key: str) -> bool:
        """Both ways: a wrong tag is refused, and the right one is taken (some stores compare it without its quotes)."""
        etag = await self._inner.put(key, b"3")
        try:
            await self._inner.put_if_match(key, b"4", WRONG_ETAG)
            return False
        except Unsupported:
            return False
        except PreconditionFailed:
            pass
        try:
            await self._inner.put_if_match(key, b"5", etag)
            return True
        except (PreconditionFailed, Unsupported):
            return False
