"""`s3kv warm`: how much of prompts is held, fetching it, or having it computed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from .common import WEEK_S, command, read_duration
from .opening import Namespace, opened_bucket
from .session import FINDING, Session
from .waiting import in_daemon

if TYPE_CHECKING:
    from s3kv.catalog.catalog import Catalog
    from s3kv.client.control import Control
    from s3kv.identity import NamespaceSpec
    from s3kv.warm.plan import Chained
    from s3kv.warm.prompts import Format
    from s3kv.warm.stored import Gain

    from .progress import Meter

_EXAMPLE = "s3kv warm prompts.jsonl --tokenizer /models/llama --through http://127.0.0.1:8000"
_KEY_VARIABLE = "OPENAI_API_KEY"
_STORED_POLL_S = 0.5
_NAMESPACE_WAIT_S = 30.0
"""A server that has just started for the first time describes its namespace within seconds."""


def register(root: typer.Typer) -> None:
    command(root, "warm", example=_EXAMPLE)(warm)


@dataclass
class Report:
    """`rows[i]` belongs to prompt i; `errors` are (source, reason)."""

    mode: str
    namespace: NamespaceSpec
    prompts: list[Chained]
    errors: list[tuple[str, str]]
    resident: list[int | None] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    sent: int = 0
    waiting: int = 0
    gained: Gain | None = None


def warm(
    session: Session,
    prompts: Annotated[list[str], typer.Argument(help="Files: text (a prompt a line) or JSONL; - is stdin.")],
    check: Annotated[bool, typer.Option("--check", help="Only say how much is held (the default).")] = False,
    prefetch: Annotated[bool, typer.Option("--prefetch", help="Bring what the bucket holds into host memory.")] = False,
    through: Annotated[
        str | None, typer.Option(help="Have this OpenAI-compatible server compute what is missing.", metavar="URL")
    ] = None,
    namespace: Namespace = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model folder with the tokenizer; bytes: a token a byte.", metavar="FOLDER"),
    ] = None,
    form: Annotated[str, typer.Option("--format", help="auto, text or jsonl.")] = "auto",
    model: Annotated[str | None, typer.Option(help="Model to ask the server for; default: its first.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Prompts at a time.")] = 4,
    timeout: Annotated[str, typer.Option(help="For one prompt.", metavar="TIME")] = "300s",
    wait: Annotated[str, typer.Option(help="Until what was computed is in the bucket.", metavar="TIME")] = "120s",
) -> None:
    """Says how much of each prompt the tier and the bucket hold; fetches it; or has a server compute what is missing.

    JSON lines hold `prompt`, `messages` (rendered by the model's chat template) or `prompt_token_ids`, and optionally
    `cache_salt` and `lora`. What the bucket holds is not computed again, so that an interrupted run can be repeated.
    """
    if sum((check, prefetch, through is not None)) > 1:
        raise typer.BadParameter("give one of --check, --prefetch and --through")
    if form not in ("auto", "text", "jsonl"):
        raise typer.BadParameter(f"{form!r} is none of auto, text, jsonl", param_hint="--format")
    mode = "through" if through is not None else "prefetch" if prefetch else "check"
    times = (read_duration(timeout, "--timeout", at_most_s=WEEK_S, zero=False), read_duration(wait, "--wait"))
    report = session.run(
        _warm(session, mode, prompts, namespace, tokenizer, form, through, model, concurrency, times)  # type: ignore[arg-type]
    )
    _tell(session, report)
    if report.errors or report.waiting:
        raise typer.Exit(FINDING)


async def _warm(
    session: Session,
    mode: str,
    files: Sequence[str],
    namespace: str | None,
    tokenizer: str | None,
    form: Format,
    through: str | None,
    model: str | None,
    concurrency: int,
    times: tuple[float, float],
) -> Report:
    from s3kv.catalog.browse import find_namespaces, pick_namespace, temporary_catalog
    from s3kv.warm.stored import stored_blocks

    give_up = time.monotonic() + _NAMESPACE_WAIT_S
    async with opened_bucket(session.settings, None) as bucket:
        found = bucket.found
        while through is not None and not found.namespaces and time.monotonic() < give_up:
            await asyncio.sleep(_STORED_POLL_S)
            found = await find_namespaces(bucket.store)
        spec = pick_namespace(found, namespace)
        folder = _model_folder(spec) if tokenizer is None else tokenizer
        with session.meter("tokenize") as meter:
            chains, errors = await in_daemon(_read, session, files, form, folder, spec, meter)
        report = Report(mode, spec, chains, errors)
        async with temporary_catalog(bucket.store, spec, session.settings.catalog) as catalog:
            report.stored = stored_blocks(catalog, chains)
            if through is not None:
                await _compute(session, report, catalog, through, model, concurrency, times)
    with session.meter("prefetch" if mode == "prefetch" else "look", len(report.prompts)) as meter:
        await in_daemon(_ask_agent, session, report, times[0], meter)
    return report


def _model_folder(spec: NamespaceSpec) -> str | None:
    """The namespace's model, where its name is a folder here."""
    return spec.model if Path(spec.model).is_absolute() and Path(spec.model).is_dir() else None


def _read(
    session: Session, files: Sequence[str], form: Format, tokenizer: str | None, spec: NamespaceSpec, meter: Meter
) -> tuple[list[Chained], list[tuple[str, str]]]:
    """What can be read, and what cannot and why. Raises ConfigError for a file or a tokenizer that cannot be opened."""
    from s3kv.errors import S3kvError
    from s3kv.warm.plan import chained
    from s3kv.warm.prompts import BadPrompt, read_prompts
    from s3kv.warm.tokens import load_tokenizer, tokens_of

    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    chains: list[Chained] = []
    errors: list[tuple[str, str]] = []
    adapters = session.settings.identity.adapters
    for name in files:
        with _lines(name) as lines:
            for prompt in read_prompts(name, lines, form):
                meter.advance()
                if isinstance(prompt, BadPrompt):
                    errors.append((prompt.source, prompt.reason))
                    continue
                try:
                    chains.append(chained(prompt, tokens_of(prompt, loaded), spec, adapters))
                except (S3kvError, ValueError) as error:
                    errors.append((prompt.source, str(error)))
    return chains, errors


@contextmanager
def _lines(name: str) -> Iterator[TextIO]:
    """Lines of UTF-8, whatever the locale says: other text would be other tokens. A byte order mark is no text."""
    from s3kv.errors import ConfigError

    try:
        source = os.dup(0) if name == "-" else name  # sys.stdin decodes by the locale
        with open(source, encoding="utf-8-sig") as file:  # noqa: PTH123 - a descriptor or a path
            yield file
    except OSError as error:
        raise ConfigError(f"prompts {name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts {name} are not UTF-8") from error


async def _compute(
    session: Session,
    report: Report,
    catalog: Catalog,
    url: str,
    model: str | None,
    concurrency: int,
    times: tuple[float, float],
) -> None:
    from s3kv.warm.plan import order
    from s3kv.warm.stored import gain, stored_blocks, wait_stored
    from s3kv.warm.through import Server, send_through

    steps = order(report.prompts, report.stored)
    server = Server(
        url, model=model, timeout_s=times[0], concurrency=concurrency, api_key=os.environ.get(_KEY_VARIABLE)
    )
    with session.meter("compute", len(steps)) as meter:
        sent = await send_through(server, report.prompts, steps, concurrency=concurrency, progress=meter.advance)
    report.sent = len(sent.done)
    report.errors += [(report.prompts[item].prompt.source, reason) for item, reason in sorted(sent.errors.items())]
    awaited = [item for item, each in enumerate(report.prompts) if item not in sent.errors and each.hashes]
    before = report.stored
    left = await wait_stored(
        catalog,
        report.prompts,
        awaited,
        deadline_s=times[1] if sent.done else 0.0,
        interval_s=_STORED_POLL_S,
        clock=time.monotonic,
        sleep=asyncio.sleep,
    )
    report.waiting = len(left)
    report.gained = gain(catalog, report.prompts, before, report.namespace.tokens_per_block)
    report.stored = stored_blocks(catalog, report.prompts)


def _ask_agent(session: Session, report: Report, timeout_s: float, meter: Meter) -> None:
    """What host memory holds, brought there first with --prefetch. Without an agent it is not known."""
    from s3kv.client.control import Control
    from s3kv.errors import AgentUnavailable

    report.resident = [None] * len(report.prompts)
    try:
        control = Control.open(session.settings.agent)
    except AgentUnavailable:
        if report.mode == "prefetch":
            raise
        return
    with control:
        for item in _by_length(report):
            try:
                report.resident[item] = _one(control, report, item, timeout_s)
            except AgentUnavailable as error:
                if report.mode == "prefetch":
                    report.errors.append((report.prompts[item].prompt.source, str(error)))
            meter.advance()


def _by_length(report: Report) -> list[int]:
    """Longest stored prefix first: what the others share is then there already."""
    return sorted(range(len(report.prompts)), key=lambda item: (-report.stored[item], item))


def _one(control: Control, report: Report, item: int, timeout_s: float) -> int:
    name, hashes = report.namespace.name, report.prompts[item].hashes
    if report.mode != "prefetch":
        return control.look(name, hashes)[0]
    return control.prefetch(name, hashes[: report.stored[item]], timeout_s)[0]


def _tell(session: Session, report: Report) -> None:
    from .text import number, size, table

    block_tokens = report.namespace.tokens_per_block
    rows, data = [], []
    for each, resident, stored in zip(report.prompts, report.resident, report.stored, strict=True):
        blocks = len(each.hashes)
        data.append(
            {"source": each.prompt.source, "tokens": len(each.tokens), "blocks": blocks, "resident_blocks": resident,
             "stored_blocks": stored}
        )  # fmt: skip
        rows.append(
            (each.prompt.source, number(len(each.tokens)), blocks, "?" if resident is None else resident, stored,
             f"{stored / blocks:.0%}" if blocks else "too short")
        )  # fmt: skip
    total = sum(len(each.hashes) for each in report.prompts)
    held = sum(report.stored)
    shown: list[Any] = [table(None, ("prompt", ">tokens", ">blocks", ">in memory", ">in bucket", ""), rows), ""]
    if report.errors:
        shown += [table("Left out", ("prompt", "why"), report.errors), ""]
    if report.gained is not None:
        gained = report.gained
        shown.append(
            f"{number(report.sent)} prompts computed; gained {number(gained.tokens)} tokens, {number(gained.blocks)} "
            f"blocks, {size(gained.bytes)}."
            + (f" {report.waiting} are not in the bucket yet." if report.waiting else "")
        )
    share = f"{held / total:.0%}" if total else "none"
    shown.append(f"{number(held * block_tokens)} of {number(total * block_tokens)} tokens are in the bucket ({share}).")
    session.emit(
        {
            "mode": report.mode,
            "namespace": report.namespace.name,
            "prompts": data,
            "errors": [{"source": source, "reason": reason} for source, reason in report.errors],
            "computed": report.sent,
            "not_stored_yet": report.waiting,
            "gained": None
            if report.gained is None
            else {"tokens": report.gained.tokens, "blocks": report.gained.blocks, "bytes": report.gained.bytes},
        },
        *shown,
    )
