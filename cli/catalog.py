"""`s3kv catalog rebuild | compact`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from .common import command, group
from .opening import Namespace, opened_bucket
from .session import Session

app = group("The catalog in the bucket: which chunks it holds.")


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="catalog")


@command(app, "rebuild", example="s3kv catalog rebuild --namespace llama")
def rebuild(session: Session, namespace: Namespace = None) -> None:
    """Makes the catalog agree with the bucket: adds whole chunks that it does not know, forgets those that are gone.

    Reads every unknown chunk's header. Damaged objects of the catalog are deleted then. May be run beside agents, and
    repeated.
    """
    from .text import number, table

    results = session.run(_each(session, namespace, "rebuild"))
    columns = ("namespace", ">known", ">found", ">forgotten", ">incomplete", ">awaiting deletion", ">damaged, deleted")
    keys = ("known", "found", "forgotten", "incomplete", "awaiting_deletion", "unreadable")
    rows = [(each["namespace"][:8], *(number(each[key]) for key in keys)) for each in results]
    session.emit(results, table(None, columns, rows))


@command(app, "compact", example="s3kv catalog compact")
def compact(session: Session, namespace: Namespace = None) -> None:
    """Folds the catalog's log into a snapshot and deletes what older snapshots hold. Agents do this by themselves."""
    from .text import number, table

    results = session.run(_each(session, namespace, "compact"))
    rows = [
        (each["namespace"][:8], number(each["folded"]), number(each["deleted"]), each["snapshot"] or "nothing to fold")
        for each in results
    ]
    session.emit(results, table(None, ("namespace", ">segments folded", ">old objects deleted", "snapshot"), rows))


async def _each(session: Session, namespace: str | None, work: str) -> list[dict[str, Any]]:
    from s3kv.catalog.browse import temporary_catalog

    results = []
    async with opened_bucket(session.settings, namespace) as bucket:
        for spec in bucket.chosen:
            async with temporary_catalog(bucket.store, spec, session.settings.catalog) as catalog:
                done = await catalog.rebuild() if work == "rebuild" else await catalog.compact(force=True)
            results.append({"namespace": spec.name, **asdict(done)})
    return results
