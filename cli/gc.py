"""`s3kv gc`: plan, show, ask, carry out; once or at intervals."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import command, read_duration, read_size
from .opening import Namespace, opened_bucket
from .session import FINDING, WRONG_USE, Session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from s3kv.gc.execute import Outcome
    from s3kv.gc.merge import Merge
    from s3kv.gc.plan import Plan
    from s3kv.gc.round import Merged, Round
    from s3kv.gc.scan import Scan

_EXAMPLE = "s3kv gc --max-bytes 2TiB --max-idle 30d --dry-run\ns3kv gc --every 1h --yes"


def register(root: typer.Typer) -> None:
    command(root, "gc", example=_EXAMPLE)(gc)


@dataclass(frozen=True)
class Options:
    """What a round is to do, and where each cut-off comes from."""

    max_bytes: int | None
    max_idle_s: float | None
    origins: dict[str, str]
    namespace: str | None
    orphans: bool
    superseded: bool
    compact: bool
    dry_run: bool
    yes: bool
    grace_s: float


@dataclass
class Shown:
    """A plan with what goes with it, ready to be shown."""

    plan: Plan
    names: Mapping[str, str]
    scans: Mapping[str, Scan]
    merge_plan: dict[str, list[Merge]]
    merges: int
    merge_parts: int
    interrupted_us: int
    """When an earlier collection was interrupted (since 1970); 0: none was."""
    unnamed: bool
    """Whether objects that no record names go, too."""
    everything: bool
    """Whether every namespace was looked at."""

    @property
    def unread(self) -> int:
        return sum(scan.unread for scan in self.scans.values())

    @property
    def unsure(self) -> int:
        return sum(scan.unsure for scan in self.scans.values())

    @property
    def settles(self) -> bool:
        """Whether nothing of an interrupted collection is left once this is carried out: all of it was looked for."""
        return self.interrupted_us > 0 and self.everything and not self.unread


def gc(
    session: Session,
    max_bytes: Annotated[
        str | None, typer.Option(help="Keep at most so much of what is chosen, e.g. 2TiB.", metavar="SIZE")
    ] = None,
    max_idle: Annotated[
        str | None, typer.Option(help="Give up what was not used for so long, e.g. 30d.", metavar="TIME")
    ] = None,
    namespace: Namespace = None,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Also objects that no record names (lists them all).")
    ] = False,
    superseded: Annotated[bool, typer.Option("--superseded", help="Also chunks that another one holds whole.")] = False,
    compact: Annotated[
        bool, typer.Option("--compact", help="Merge small chunks of one chain; implies --superseded.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    grace: Annotated[
        str | None, typer.Option(help="Between forgetting and deleting; default: collect.grace_s.", metavar="TIME")
    ] = None,
    every: Annotated[
        str | None, typer.Option(help="Go on, once in so long (needs --yes); --json: a line a round.", metavar="TIME")
    ] = None,
) -> None:
    """Collects what is not worth keeping: plans from the catalog, shows the plan, asks, and deletes in two phases.

    Deletions are published first; after the grace period the catalog is read again and what nobody stored anew is
    deleted. A shared prefix goes after what depends on it. May be interrupted and run again at any time.
    """
    options = _options(session, max_bytes, max_idle, namespace, orphans, superseded, compact, dry_run, yes, grace)
    if every is None:
        raise typer.Exit(session.run(_round(session, options)))
    if not (yes or dry_run):
        raise typer.BadParameter("add --yes: nobody is there to answer", param_hint="--every")
    session.repeats = True
    session.run(_for_ever(session, options, read_duration(every, "--every")))


def _options(
    session: Session,
    max_bytes: str | None,
    max_idle: str | None,
    namespace: str | None,
    orphans: bool,
    superseded: bool,
    compact: bool,
    dry_run: bool,
    yes: bool,
    grace: str | None,
) -> Options:
    collect = session.settings.collect
    origins = {
        "max-bytes": "collect.max_bytes" if max_bytes is None else "--max-bytes",
        "max-idle": "collect.max_idle_s" if max_idle is None else "--max-idle",
        "grace": "collect.grace_s" if grace is None else "--grace",
    }
    options = Options(
        max_bytes=collect.max_bytes if max_bytes is None else read_size(max_bytes, "--max-bytes"),
        max_idle_s=collect.max_idle_s if max_idle is None else read_duration(max_idle, "--max-idle"),
        origins=origins,
        namespace=namespace,
        orphans=orphans,
        superseded=superseded or compact,
        compact=compact,
        dry_run=dry_run,
        yes=yes,
        grace_s=collect.grace_s if grace is None else read_duration(grace, "--grace"),
    )
    if options.max_bytes is None and options.max_idle_s is None and not (orphans or options.superseded):
        session.say(
            "s3kv: nothing says what to collect: give --max-bytes, --max-idle, --orphans, --superseded or --compact, "
            "or set collect.max_bytes or collect.max_idle_s"
        )
        raise typer.Exit(WRONG_USE)
    return options


async def _for_ever(session: Session, options: Options, every_s: float) -> None:
    """Rounds at intervals. A failure is told and tried again: a sidecar must survive an outage of the store."""
    from s3kv.errors import S3kvError

    while True:
        began = time.monotonic()
        try:
            await _round(session, options)
        except S3kvError as error:
            session.say(f"s3kv: {error}")
        await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))


async def _round(session: Session, options: Options) -> int:
    """The exit code."""
    from s3kv.gc.round import interrupted_since, opened_round

    async with opened_bucket(session.settings, options.namespace) as bucket:
        interrupted_us = await interrupted_since(bucket.store)
        async with opened_round(bucket.store, session.settings, bucket.chosen) as opened:
            shown = await _plan(session, options, opened, interrupted_us)
            if not session.json:
                for each in _renderables(shown, options):
                    session.out.print(each)
            nothing = not len(shown.plan) and not shown.merges
            if options.dry_run or (nothing and not shown.settles):
                if session.json:
                    session.print_json(_plan_data(shown, options) | {"dry_run": options.dry_run})
                return 0
            if not nothing:
                await session.confirm("Go ahead?", yes=options.yes)
            return await _carry_out(session, options, opened, shown)


async def _plan(session: Session, options: Options, opened: Round, interrupted_us: int) -> Shown:
    from s3kv.catalog.context import TOMBSTONE_KEEP_S
    from s3kv.catalog.entry import US
    from s3kv.gc.plan import Policy

    now = time.time()  # noqa: TID251 - the CLI is where clocks come from
    scans: Mapping[str, Scan] = {}
    # Catalogs forget what was deleted after a while: then what an interrupted collection left is named by no record.
    unnamed = options.orphans or (interrupted_us > 0 and now - interrupted_us / US > TOMBSTONE_KEEP_S)
    if options.orphans or interrupted_us:
        with session.meter("list objects") as meter:
            scans = await opened.scan(now=now, progress=meter.advance)
    policy = Policy(now, options.max_bytes, options.max_idle_s, options.superseded)
    plan = await asyncio.to_thread(opened.plan, policy, opened.orphans(scans, unnamed=unnamed))
    merges = await asyncio.to_thread(opened.merges, plan) if options.compact else {}
    return Shown(
        plan=plan,
        names={spec.name: f"{spec.name[:8]} {spec.model}" for spec in opened.namespaces},
        scans=scans,
        merge_plan=merges,
        merges=sum(map(len, merges.values())),
        merge_parts=sum(len(merge.parts) for each in merges.values() for merge in each),
        interrupted_us=interrupted_us,
        unnamed=unnamed,
        everything=options.namespace is None,
    )


async def _carry_out(session: Session, options: Options, opened: Round, shown: Shown) -> int:
    from s3kv.catalog.entry import US
    from s3kv.gc.execute import Pace, Progress, execute
    from s3kv.gc.lease import Heartbeat, held
    from s3kv.gc.round import LEASE_NAME

    lease_s = session.settings.collect.lease_s
    since_us = shown.interrupted_us
    resumed = since_us > 0 and time.time() - since_us / US >= options.grace_s  # noqa: TID251
    holder = f"{socket.gethostname()}:{os.getpid()}"
    watch = _Watching(session, lease_s)
    async with held(opened.store, LEASE_NAME, holder, lease_s=lease_s, sleep=watch.sleep) as lease:
        # Another collection may have been interrupted since this one looked.
        settles = lease.state.pending_us == 0 or (shown.settles and lease.state.pending_us == since_us)
        pace = Pace(options.grace_s, lease_s, time.monotonic, time.time, asyncio.sleep, resumed, settles)  # noqa: TID251
        merged, plan = None, shown.plan
        if shown.merges:
            beat = Heartbeat(lease, lease_s, time.monotonic)
            with session.meter("merge", shown.merge_parts) as meter:
                merged = await opened.merge(shown.merge_plan, meter.advance, beat)
            orphans = opened.orphans(shown.scans, unnamed=shown.unnamed)
            plan = await asyncio.to_thread(opened.plan, plan.policy, orphans)
        with session.meter("forget", len(plan)) as meter:
            progress = Progress(
                lambda count: meter.phase("forget", len(plan), count),
                lambda seconds: meter.phase("grace period", round(options.grace_s), round(seconds)),
                lambda count: meter.phase("delete", len(plan), count),
            )
            outcome = await execute(plan, opened.places, opened.store, lease, pace, progress)
    for catalog in opened.catalogs.values():
        if catalog.wants_compaction():
            await catalog.compact()
    _report(session, options, shown, outcome, merged)
    return FINDING if outcome.failures else 0


class _Watching:
    """Says once why nothing happens while another collector's lease is watched for a sign of life."""

    def __init__(self, session: Session, lease_s: float) -> None:
        self._session = session
        self._lease_s = lease_s
        self._told = False

    async def sleep(self, seconds: float) -> None:
        if not self._told:
            self._told = True
            self._session.say(
                f"s3kv: a lease is there: watching for {self._lease_s:g} s (collect.lease_s) whether its holder lives"
            )
        await asyncio.sleep(seconds)


def _report(session: Session, options: Options, shown: Shown, outcome: Outcome, merged: Merged | None) -> None:
    from .text import number, size, table

    data = _plan_data(shown, options) | {
        "merged": {"chunks_made": merged.made, "from": merged.parts, "bad": merged.bad} if merged else None,
        "deleted": {"chunks": outcome.chunks, "objects": outcome.objects, "bytes": outcome.bytes},
        "stored_again": outcome.kept,
        "failures": [{"key": each.key, "error": str(each.error)} for each in outcome.failures],
    }
    told: list[Any] = []
    if merged is not None:
        told.append(f"Merged {number(merged.parts)} chunks into {number(merged.made)}.")
    told.append(
        f"Deleted {number(outcome.chunks)} chunks, {number(outcome.objects)} objects, {size(outcome.bytes)}."
        + (f" {number(outcome.kept)} were stored again meanwhile and stay." if outcome.kept else "")
    )
    if outcome.failures:
        rows = [(each.key, each.error) for each in outcome.failures[:20]]
        told += [table(None, ("not deleted", "why"), rows)]
        told.append(f"{number(len(outcome.failures))} objects are still there: run s3kv gc again.")
    session.emit(data, *told)


def _plan_data(shown: Shown, options: Options) -> dict[str, Any]:
    plan = shown.plan
    return {
        "before": {"chunks": plan.chunks_before, "bytes": plan.bytes_before},
        "after": {"bytes": plan.bytes_after},
        "plan": [
            {
                "namespace": line.namespace,
                "why": line.reason.name.lower(),
                "chunks": line.chunks,
                "objects": line.objects,
                "blocks": line.blocks,
                "bytes": line.bytes,
            }
            for line in plan.lines()
        ],
        "merges": {"chunks": shown.merge_parts, "into": shown.merges},
        "cutoffs": _cutoffs(options),
        "unread_catalog_objects": shown.unread,
        "unsure_chunks": shown.unsure,
        "foreign_objects": sum(scan.foreign for scan in shown.scans.values()),
        "resumes": shown.interrupted_us > 0,
    }


def _cutoffs(options: Options) -> list[dict[str, Any]]:
    values = {"max-bytes": options.max_bytes, "max-idle": options.max_idle_s, "grace": options.grace_s}
    return [
        {"cutoff": name, "value": value, "from": options.origins[name]}
        for name, value in values.items()
        if value is not None
    ]


def _renderables(shown: Shown, options: Options) -> list[Any]:
    from .text import duration, number, size, table

    plan = shown.plan
    cutoffs = [
        (
            each["cutoff"],
            size(each["value"]) if each["cutoff"] == "max-bytes" else duration(each["value"]),
            each["from"],
        )
        for each in _cutoffs(options)
    ]
    lines = [
        (
            shown.names.get(line.namespace, line.namespace[:8]),
            line.reason.text,
            number(line.chunks),
            number(line.objects),
            number(line.blocks),
            size(line.bytes),
        )
        for line in plan.lines()
    ]
    told: list[Any] = [table("Cut-offs", ("cut-off", ">value", "from"), cutoffs), ""]
    if shown.interrupted_us:
        told.append("An earlier collection was interrupted: what it forgot and did not delete is taken up again.")
    if shown.merges:
        told.append(
            f"Merge {number(shown.merge_parts)} small chunks into {number(shown.merges)}; these then supersede them."
        )
    if lines:
        told += [table("Plan", ("namespace", "why", ">chunks", ">objects", ">blocks", ">bytes"), lines), ""]
    if shown.unread:
        told.append(
            f"{number(shown.unread)} objects of the catalog cannot be read, so {number(shown.unsure)} chunks without a "
            "record are left alone: run s3kv catalog rebuild first (or wait, if a node's clock was ahead)."
        )
    foreign = sum(scan.foreign for scan in shown.scans.values())
    if foreign:
        told.append(f"{number(foreign)} objects under chunk/ are none of s3kv's and are left alone.")
    told.append(
        f"{number(plan.chunks_before)} chunks, {size(plan.bytes_before)} now; {size(plan.bytes_after)} after."
        if lines or shown.merges
        else f"Nothing to collect: {number(plan.chunks_before)} chunks, {size(plan.bytes_before)}."
    )
    if options.dry_run:
        told.append("Dry run: nothing was changed.")
    return told
