"""Removing what doctor and bench store have put, when they could not do it themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from s3kv.errors import StoreError
from s3kv.store.base import Store

GIVE_UP_S = 2.0


async def remove_scratch(store: Store, keys: Sequence[str]) -> None:
    """For the end of work that failed or was cancelled. Never raises StoreError: it would hide what happened.

    Somebody waits at Ctrl-C, and a store that has just failed may not answer, so it is given GIVE_UP_S. What is left
    then goes by the bucket's lifecycle rule for `s3kv-scratch/`.
    """
    with suppress(StoreError, TimeoutError):
        async with asyncio.timeout(GIVE_UP_S):
            await store.delete(keys)
