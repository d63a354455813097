"""`s3kv agent run | status | drain | stop | forget`, and `s3kv top`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from .common import WEEK_S, command, group, read_duration
from .session import FINDING, Session

if TYPE_CHECKING:
    from s3kv.client.control import Control

app = group("The node's agent, which owns host memory, uploads and fetches.")

T = TypeVar("T")

Wait = Annotated[str | None, typer.Option(help="At most so long; default: agent.drain_s.", metavar="TIME")]


def register(root: typer.Typer) -> None:
    from .top import top

    root.add_typer(app, name="agent")
    command(root, "top", example="s3kv top --interval 2s")(top)


def ask(session: Session, question: Callable[[Control], T]) -> T:
    """Raises AgentUnavailable, one sentence, when there is no agent or it does not answer."""
    from s3kv.client.control import Control

    with Control.open(session.settings.agent) as control:
        return question(control)


@command(app, "run", example="s3kv agent run --store s3://my-kv/prod")
def run(
    session: Session,
    metrics_port: Annotated[int | None, typer.Option(min=0, max=65535, help="agent.metrics_port.")] = None,
) -> None:
    """Runs the agent in the foreground, as a service manager wants it. SIGTERM flushes, then ends.

    Exit code 1 when some blocks could not be stored at the end.
    """
    from s3kv.agent.service import run as serve

    if metrics_port is not None:
        session.overrides.setdefault("agent", {})["metrics_port"] = metrics_port
    raise typer.Exit(serve(session.settings))


@command(app, "status", example="s3kv agent status --json")
def status(session: Session) -> None:
    """What the agent holds and does now."""
    from .text import number, size, table

    fields = ask(session, lambda control: control.status())
    totals = fields["totals"]
    facts = [
        ("version", fields.get("version", "")),
        ("process", fields.get("pid", "")),
        ("store", fields["store"]),
        ("host memory", f"{size(fields['charged_bytes'])} of {size(fields['capacity_bytes'])} used"),
        ("connections", fields["clients"]),
        ("uploaded", f"{number(totals['uploaded_chunks'])} chunks, {size(totals['uploaded_bytes'])}"),
        ("fetched", f"{number(totals['fetched_blocks'])} blocks, {size(totals['fetched_bytes'])}"),
        (
            "not stored",
            f"{number(totals['dropped_blocks'])} blocks dropped, {number(totals['failed_puts'])} failed puts",
        ),
    ]
    columns = ("namespace", "model", ">engines", ">slots", ">resident", ">dirty", ">pinned", ">waiting", ">chunks")
    session.emit(
        fields, table(None, ("", ""), facts), "", table(None, columns, map(_namespace_row, fields["namespaces"]))
    )


def _namespace_row(each: dict[str, Any]) -> tuple[Any, ...]:
    from .text import number

    tier = each["tier"]
    counts = (tier["slots"], tier["resident"], tier["dirty"], tier["pinned"], each["waiting_blocks"])
    stored = each["catalog"].get("chunks", "") if each["catalog_open"] else "not read yet"
    return (each["namespace"][:8], each["model"], each["engines"], *map(number, counts), stored)


@command(app, "drain", example="s3kv agent drain --wait 60s")
def drain(session: Session, wait: Wait = None) -> None:
    """Stores everything that waits to be stored, and goes on. Exit code 1 when that was not done in time."""
    deadline_s = _deadline(session, wait)
    _tell_drained(session, ask(session, lambda control: control.drain(deadline_s)))


@command(app, "stop", example="s3kv agent stop")
def stop(session: Session, wait: Wait = None) -> None:
    """Stores what waits, then ends the agent. Engines go on without it. Exit code 1 when blocks were not stored."""
    deadline_s = _deadline(session, wait)
    _tell_drained(session, ask(session, lambda control: control.stop(deadline_s)))


def _deadline(session: Session, wait: str | None) -> float:
    return session.settings.agent.drain_s if wait is None else read_duration(wait, "--wait", at_most_s=WEEK_S)


def _tell_drained(session: Session, drained: tuple[int, int]) -> None:
    chunks, unsaved = drained
    session.emit(
        {"chunks": chunks, "unsaved_blocks": unsaved}, f"{chunks:,} chunks stored, {unsaved:,} blocks not stored."
    )
    if unsaved:
        raise typer.Exit(FINDING)


@command(app, "forget", example="s3kv agent forget --namespace 5f2c01aa…")
def forget(
    session: Session,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="The beginning of its name; all without it.", metavar="NAME")
    ] = None,
) -> None:
    """Drops blocks from host memory (not from the bucket) that nobody uses and that need not be stored any more."""

    def question(control: Control) -> int:
        return control.forget("" if namespace is None else _full_name(control, namespace))

    count = ask(session, question)
    session.emit({"blocks": count}, f"{count:,} blocks forgotten.")


def _full_name(control: Control, wanted: str) -> str:
    served = control.status()["namespaces"]
    names = [each["namespace"] for each in served if each["namespace"].startswith(wanted) or each["model"] == wanted]
    if len(names) != 1:
        known = ", ".join(f"{each['namespace'][:8]} ({each['model']})" for each in served) or "none"
        raise typer.BadParameter(
            f"{wanted!r} does not name one that the agent serves: {known}", param_hint="--namespace"
        )
    return str(names[0])
