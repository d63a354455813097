"""Moving bytes between callers' buffers and clients' buffers without holding up the event loop."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

from s3kv.store.base import Body, BytesLike

THREAD_COPY_BYTES = 1 << 20
"""Copies above this go to a thread: 1 MiB takes some 160 µs at 6.3 GB/s, a thread's hop costs about 50 µs."""
RETURN_POLL_S = 0.0005
RETURN_POLLS = 20_000

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)


async def in_thread(executor: Executor | None, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in `executor` (None: the loop's own). A cancelled call still waits for the thread to end.

    Why: a thread cannot be stopped, and the buffers it touches are the caller's again as soon as this returns.
    """
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(executor, functools.partial(function, *args, **kwargs))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()  # seen: asyncio would otherwise log it as never retrieved
        raise


def body_parts(body: Body) -> list[memoryview]:
    """The body as flat byte views, empty ones left out; nothing is copied."""
    whole: Sequence[BytesLike] = [body] if isinstance(body, bytes | bytearray | memoryview) else body
    views = [memoryview(part).cast("B") for part in whole]
    return [view for view in views if view.nbytes]


def body_size(parts: Sequence[memoryview]) -> int:
    return sum(part.nbytes for part in parts)


async def join(parts: Sequence[memoryview]) -> bytes:
    """The body as one buffer of its own; in a thread when it is long."""
    if body_size(parts) > THREAD_COPY_BYTES:
        return await in_thread(None, b"".join, parts)
    return b"".join(parts)


def check_out(out: memoryview) -> memoryview:
    """`out` as flat writable bytes. Raises ValueError otherwise."""
    if out.readonly or not out.c_contiguous:
        raise ValueError("the output buffer must be writable and contiguous")
    return out.cast("B")


def check_ranges(ranges: Sequence[tuple[int, int]], outs: Sequence[memoryview]) -> list[memoryview]:
    """The outputs as flat bytes. Raises ValueError when ranges and outputs do not fit each other."""
    if len(ranges) != len(outs):
        raise ValueError(f"{len(ranges)} ranges for {len(outs)} outputs")
    flat = [check_out(out) for out in outs]
    for (offset, length), out in zip(ranges, flat, strict=True):
        if offset < 0 or length != out.nbytes:
            raise ValueError(f"range ({offset}, {length}) does not fit its output of {out.nbytes} bytes")
    return flat


Piece = tuple[memoryview, memoryview]
"""Where bytes go, and the bytes, of the same length."""


def _copy_without_the_interpreter_lock(pieces: Sequence[Piece]) -> None:
    """A slice assignment would hold the lock, and with it the event loop, for the whole copy; numpy's does not."""
    import numpy as np

    for out, data in pieces:
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))


async def copy_pieces(pieces: Sequence[Piece]) -> None:
    """In a thread when it is much: one hop for all, since a hop costs as much as 300 KiB."""
    if sum(out.nbytes for out, _ in pieces) > THREAD_COPY_BYTES:
        await in_thread(None, _copy_without_the_interpreter_lock, [piece for piece in pieces if piece[0].nbytes])
    else:
        for out, data in pieces:
            out[:] = data


async def until_returned(views: Sequence[memoryview]) -> None:
    """Wait until a client that was given `views` has let go of them (a cancelled request does so a little later).

    A view with exports cannot be released: that is how it is known. After some 10 s (a client that leaks) it gives up,
    with a warning: what is sent then no longer matches its checksum, which readers find.
    """
    cancelled = False
    polls = 0
    for view in views:
        while polls < RETURN_POLLS:
            try:
                view.release()
                break
            except BufferError:
                polls += 1
                try:
                    await asyncio.sleep(RETURN_POLL_S)
                except asyncio.CancelledError:
                    cancelled = True
    if polls >= RETURN_POLLS:
        log.warning("an object store client kept a buffer after its call had ended")
    if cancelled:
        raise asyncio.CancelledError


async def for_each(items: Sequence[T], act: Callable[[T], Awaitable[None]], at_once: int = 16) -> None:
    """`act` on every item, up to `at_once` at a time. After the first error the others are cancelled and awaited before
    it is raised: nothing touches a caller's buffer once this has returned."""
    if len(items) == 1:
        await act(items[0])
        return
    slots = asyncio.Semaphore(at_once)

    async def limited(item: T) -> None:
        async with slots:
            await act(item)

    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(limited(item))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
