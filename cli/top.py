"""`s3kv top`: a live view of the node's agent."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import read_duration
from .session import Session

if TYPE_CHECKING:
    from rich.console import Group

    from s3kv.client.control import Control
    from s3kv.client.sample import Sample, View


def top(
    session: Session,
    interval: Annotated[str, typer.Option(help="Between two looks.", metavar="TIME")] = "2s",
    count: Annotated[
        int | None,
        typer.Option(
            min=1, help="End after so many looks; default: at Ctrl-C, in a pipe after one. --json: a line a look."
        ),
    ] = None,
) -> None:
    """Hit rates, bytes a second each way, queues, how full the tier is, and the slowest calls; Ctrl-C ends it."""
    from s3kv.client.control import Control

    seconds = max(0.05, read_duration(interval, "--interval"))
    with Control.open(session.settings.agent) as control:
        if session.json or not session.out.is_terminal:
            _stream(session, control, seconds, count or 1)
        else:
            _live(session, control, seconds, count)


def _sample(control: Control) -> Sample:
    from s3kv.client.sample import Sample

    return Sample.parse(time.monotonic(), control.metrics(), control.status())


def _stream(session: Session, control: Control, seconds: float, count: int) -> None:
    """Without a terminal: one view after another."""
    from s3kv.client.sample import between

    session.repeats = count > 1
    before = _sample(control)
    for _ in range(count):
        time.sleep(seconds)  # noqa: TID251 - a person's clock
        after = _sample(control)
        view = between(before, after)
        session.emit(_as_data(view, after), picture(view, after))
        before = after


def _live(session: Session, control: Control, seconds: float, count: int | None) -> None:
    from rich.live import Live

    from s3kv.client.sample import between

    before = _sample(control)
    rounds = itertools.count() if count is None else range(count)
    first = picture(between(before, before), before)
    with Live(first, console=session.out, screen=count is None, auto_refresh=False) as live:
        for _ in rounds:
            time.sleep(seconds)  # noqa: TID251 - a person's clock
            after = _sample(control)
            live.update(picture(between(before, after), after), refresh=True)
            before = after


def _as_data(view: View, sample: Sample) -> dict[str, Any]:
    calls = [
        {"call": c.name, "count": c.count, "failed": c.failed, "mean_s": c.mean_s, "slowest_s": c.slowest_s}
        for c in view.calls
    ]
    return {
        "seconds": view.seconds,
        "found_blocks": view.found,
        "per_s": view.rates,
        "calls": calls,
        "status": dict(sample.status),
    }


def picture(view: View, sample: Sample) -> Group:
    """One frame."""
    from rich.console import Group

    from .text import bar, duration, number, size, table

    status = sample.status
    found = [
        (where, number(count), "" if (s := view.share(where)) is None else f"{s:.0%}", bar(s or 0.0))
        for where, count in sorted(view.found.items())
    ]
    rates = view.rates
    traffic = [
        ("to the bucket", f"{size(rates['uploaded_bytes'])}/s", f"{number(rates['saved_blocks'])} blocks/s saved"),
        ("from the bucket", f"{size(rates['fetched_bytes'])}/s", f"{number(rates['fetched_blocks'])} blocks/s"),
        ("dropped", f"{number(rates['dropped_blocks'])} blocks/s", ""),
        ("failed", f"{rates['failed_puts']:.1f} puts/s", f"{rates['failed_fetches']:.1f} fetches/s"),
    ]
    calls = [
        (c.name, number(c.count), number(c.failed), duration(c.mean_s), f"≤ {duration(c.slowest_s)}")
        for c in view.calls
    ]
    used, capacity = status["charged_bytes"], status["capacity_bytes"]
    head = f"{status['store']}   tier {size(used)} of {size(capacity)} {bar(used / max(capacity, 1))}"
    namespaces = [_namespace(each) for each in status["namespaces"]]
    columns = ("namespace", "model", ">resident", ">of slots", "fill", ">waiting", ">uploading", ">fetching")
    return Group(
        head,
        "",
        table("Namespaces", columns, namespaces),
        "",
        table("Blocks asked for", ("found in", ">blocks", ">share", ""), found),
        "",
        table("Traffic", ("", ">", ""), traffic),
        "",
        table("Calls to the store", ("call", ">count", ">failed", ">mean", ">slowest"), calls),
    )


def _namespace(each: dict[str, Any]) -> tuple[Any, ...]:
    from .text import bar, number

    tier = each["tier"]
    slots = max(1, tier["slots"])
    return (
        each["namespace"][:8],
        each["model"],
        number(tier["resident"]),
        number(tier["slots"]),
        bar(tier["in_use"] / slots, 10),
        number(each["waiting_blocks"]),
        number(each["uploading_chunks"]),
        number(each["fetching_chunks"]),
    )
