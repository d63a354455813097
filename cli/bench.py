"""`s3kv bench store`: what a bucket gives to s3kv, and from which prompt length loading beats computing."""

from __future__ import annotations

import random
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import check_finite, command, group, read_size
from .opening import opened_store
from .session import Session

if TYPE_CHECKING:
    from s3kv.store.bench import Rates

app = group("Measuring.")

_MOST_BYTES = 1 << 30
"""Each get has a buffer of its own; chunks are far smaller."""
_BLOCK_BYTES = 1 << 20


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="bench")


@command(app, "store", example="s3kv bench store --store s3://my-kv/prod --prefill 12000 --kv-bytes 131072")
def store(
    session: Session,
    objects: Annotated[int, typer.Option(min=1, max=10_000, help="Objects to put and get.")] = 16,
    object_size: Annotated[str, typer.Option("--size", help="Bytes of each.")] = "32MiB",
    concurrency: Annotated[int | None, typer.Option(min=1, help="At once; default: fetch.concurrency.")] = None,
    prefill: Annotated[float, typer.Option(min=1.0, help="Tokens a second that the GPUs compute.")] = 10_000.0,
    kv_bytes: Annotated[int, typer.Option(min=1, help="KV bytes a token, over all layers and shards.")] = 131_072,
    ratio: Annotated[float, typer.Option(min=1.0, help="How much the codec shrinks them.")] = 1.3,
) -> None:
    """Puts and gets objects as s3kv would, under a scratch prefix, and says from which prompt length loading pays."""
    from s3kv.store.bench import FIRST_BYTE_READ, break_even

    from .text import number, size, table

    each = read_size(object_size, "--size", at_least=FIRST_BYTE_READ, at_most=_MOST_BYTES)
    check_finite(prefill, "--prefill")
    check_finite(ratio, "--ratio")
    at_once = concurrency or session.settings.fetch.concurrency
    rates = session.run(_measure(session, objects, each, at_once))
    even = break_even(rates, bytes_per_token=kv_bytes, prefill_tokens_s=prefill, ratio=ratio)
    verdict = (
        f"Loading beats computing from {number(even.tokens)} tokens on"
        if even.tokens is not None
        else "Loading never beats computing at this speed"
    )
    rows = [
        ("put", f"{rates.put_bytes_s / 1e6:,.0f} MB/s"),
        ("get", f"{rates.get_bytes_s / 1e6:,.0f} MB/s"),
        ("first byte", f"{rates.first_byte_median_s * 1000:.1f} ms (99 %: {rates.first_byte_p99_s * 1000:.1f} ms)"),
        ("loading", f"{number(even.load_tokens_s)} tokens/s"),
        ("computing", f"{number(prefill)} tokens/s"),
    ]
    session.emit(
        _as_data(rates) | {"load_tokens_per_s": even.load_tokens_s, "break_even_tokens": even.tokens},
        f"{objects} objects of {size(each)}, {at_once} at once",
        table(None, ("", ">"), rows),
        f"{verdict} ({kv_bytes:,} KV bytes a token, {ratio:g} : 1).",
        *_about_left(rates),
    )


def _about_left(rates: Rates) -> list[str]:
    from s3kv.store.keys import SCRATCH_PREFIX

    if not rates.left_objects:
        return []
    return [
        f"{rates.left_objects} objects are left under {SCRATCH_PREFIX}: these credentials may not delete. "
        "The bucket's lifecycle rule removes them after a day."
    ]


async def _measure(session: Session, objects: int, each: int, concurrency: int) -> Rates:
    from s3kv.store.bench import measure_store
    from s3kv.store.keys import SCRATCH_PREFIX

    block = random.Random(0).randbytes(min(each, _BLOCK_BYTES))
    body = (block * -(-each // len(block)))[:each]
    async with opened_store(session.settings) as opened:
        with session.meter("put and get", 2 * objects * each, size=True) as meter:
            return await measure_store(
                opened,
                f"{SCRATCH_PREFIX}bench-{secrets.token_hex(8)}/",
                body,
                objects=objects,
                concurrency=concurrency,
                clock=time.monotonic,
                progress=meter.advance,
            )


def _as_data(rates: Rates) -> dict[str, Any]:
    return {
        "objects": rates.objects,
        "object_bytes": rates.object_bytes,
        "concurrency": rates.concurrency,
        "put_bytes_per_s": rates.put_bytes_s,
        "get_bytes_per_s": rates.get_bytes_s,
        "first_byte_median_s": rates.first_byte_median_s,
        "first_byte_p99_s": rates.first_byte_p99_s,
        "left_objects": rates.left_objects,
    }
