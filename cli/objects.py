"""`s3kv ls | inspect | verify`: single objects and whether they are what they should be."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import check_finite, command
from .opening import Namespace, opened_bucket, opened_store
from .session import FINDING, Session

if TYPE_CHECKING:
    from s3kv.catalog.entry import ChunkEntry
    from s3kv.gc.inspect import Inspection
    from s3kv.gc.verify import Summary, Verdict
    from s3kv.store import Store

_ID = re.compile(r"[0-9a-f]{32}")
_AFTER_SUBTREE = "\U0010ffff"


def register(root: typer.Typer) -> None:
    command(root, "ls", example="s3kv ls ns/")(ls)
    command(root, "inspect", example="s3kv inspect 5f2c…e1 --namespace llama")(inspect)
    command(root, "verify", example="s3kv verify --sample 0.05 --repair")(verify)


def ls(
    session: Session,
    prefix: Annotated[str, typer.Argument(help="Where to look, relative to store.url.")] = "",
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="All objects below, not one level.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many lines.")] = 1000,
) -> None:
    """Objects and folders of the bucket."""
    from .text import moment, size, table

    prefix = prefix.removeprefix(session.settings.store.url).strip("/")
    if prefix:
        prefix = _checked(prefix, "PREFIX") + "/"
    found = session.run(_listed(session, prefix, recursive, limit))
    rows = [
        (size(each["size"]), moment(each["modified"]), each["key"]) if "size" in each else ("", "", each["key"])
        for each in found[:limit]
    ]
    lines: list[Any] = [table(None, (">size", "modified (UTC)", "key"), rows)]
    if len(found) > limit:
        lines.append(f"… more than {limit}: narrow the prefix, or raise --limit")
    session.emit({"objects": found[:limit], "more": len(found) > limit}, *lines)


def _checked(key: str, argument: str) -> str:
    """`key` itself. Raises typer.BadParameter when no object can have it."""
    from s3kv.store.keys import why_bad_key

    if reason := why_bad_key(key):
        raise typer.BadParameter(f"{key!r} {reason}", param_hint=argument)
    return key


async def _listed(session: Session, prefix: str, recursive: bool, limit: int) -> list[dict[str, Any]]:
    """Up to limit + 1 entries."""
    async with opened_store(session.settings) as store:
        entries: list[dict[str, Any]] = []
        folders = [] if recursive else [{"key": name} for name in await store.list_prefixes(prefix)]
        async for entry in _objects(store, prefix, recursive):
            entries.append(entry)
            if len(entries) + len(folders) > limit:
                break
        return sorted([*folders, *entries], key=lambda each: str(each["key"]))


async def _objects(store: Store, prefix: str, recursive: bool) -> AsyncIterator[dict[str, Any]]:
    """The objects under `prefix`; without `recursive` only those right at it, with whole folders skipped over."""
    after: str | None = None
    while True:
        folder = None
        async for page in store.list(prefix, after):
            for meta in page:
                rest = meta.key.removeprefix(prefix)
                if not recursive and "/" in rest:
                    folder = prefix + rest.partition("/")[0] + "/"
                    break
                yield {"key": meta.key, "size": meta.size, "modified": meta.modified}
            if folder is not None:
                break
        if folder is None:
            return
        after = folder + _AFTER_SUBTREE


def inspect(
    session: Session,
    key: Annotated[str, typer.Argument(help="A key as `s3kv ls` shows it, or a chunk id of 32 hex digits.")],
    namespace: Namespace = None,
    check: Annotated[bool, typer.Option(help="Read every frame and check its checksum.")] = True,
) -> None:
    """What an object says of itself: a chunk's header, blocks and checksums; a segment's records; a description."""
    from rich.text import Text

    from .text import table

    found = session.run(_inspect(session, key, namespace, check))
    data = [_inspection_data(each) for each in found]
    shown: list[Any] = []
    for each in found:
        facts = {"key": each.key, "kind": each.kind, "bytes": each.size, **each.facts}
        shown.append(table(None, ("", ""), [(name, _plain(value)) for name, value in facts.items()]))
        if each.rows:
            names = list(each.rows[0])
            shown += ["", table(None, names, [[row[name] for name in names] for row in each.rows])]
        if each.problem:
            shown.append(Text.assemble(("BAD", "red"), f": {each.problem}"))
        shown.append("")
    session.emit(data, *shown[:-1])
    if any(each.problem for each in found):
        raise typer.Exit(FINDING)


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def _inspection_data(each: Inspection) -> dict[str, Any]:
    facts = {name.replace(" ", "_"): value for name, value in each.facts.items()}
    return {"key": each.key, "kind": each.kind, "bytes": each.size, **facts, "rows": each.rows, "problem": each.problem}


async def _inspect(session: Session, key: str, namespace: str | None, check: bool) -> list[Inspection]:
    from s3kv.errors import NotFound
    from s3kv.format.keys import chunk_prefix
    from s3kv.gc.inspect import inspect_key

    key = _checked(key.removeprefix(session.settings.store.url).strip("/"), "KEY")
    if not _ID.fullmatch(key):
        async with opened_store(session.settings) as store:
            return [await inspect_key(store, key, check=check)]
    async with opened_bucket(session.settings, namespace) as bucket:
        found = []
        for spec in bucket.chosen:
            async for page in bucket.store.list(chunk_prefix(spec.name, bytes.fromhex(key))):
                found += [await inspect_key(bucket.store, meta.key, check=check) for meta in page]
        if not found:
            raise NotFound(f"no chunk {key} in the bucket")
        return found


def verify(
    session: Session,
    namespace: Namespace = None,
    sample: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the chunks to read.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Another seed takes another sample.")] = 0,
    repair: Annotated[bool, typer.Option("--repair", help="Forget what is missing or corrupt.")] = False,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Chunks at once; default: fetch.concurrency.")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Remembers how far it came, so that an interrupted run goes on there.")
    ] = None,
) -> None:
    """Reads chunks back and checks identity, lengths and checksums. Exit code 1 when something is bad."""
    from .text import size, table

    check_finite(sample, "--sample")
    summary = session.run(_verify(session, namespace, sample, seed, repair, concurrency, state))
    bad = [("bad", v.chunk_id.hex(), v.detail) for v in summary.bad]
    bad += [("unreadable", v.chunk_id.hex(), v.detail) for v in summary.unreadable]
    data = {
        "checked": summary.checked,
        "bytes": summary.bytes,
        "bad": [{"chunk": v.chunk_id.hex(), "reason": _reason(v), "detail": v.detail} for v in summary.bad],
        "unreadable": [{"chunk": v.chunk_id.hex(), "detail": v.detail} for v in summary.unreadable],
        "repaired": len(summary.bad) if repair else 0,
    }
    counts = f"{len(summary.bad)} bad, {len(summary.unreadable)} unreadable"
    told = f"{summary.checked:,} chunks read, {size(summary.bytes)}: {counts}"
    shown: list[Any] = [table(None, ("", "chunk", "finding"), bad)] if bad else []
    if summary.bad:
        shown.append(
            "Forgotten: they will be misses and are stored again." if repair else "Run with --repair to forget them."
        )
    session.emit(data, *shown, told)
    if bad:
        raise typer.Exit(FINDING)


def _reason(verdict: Verdict) -> str:
    return verdict.reason.name.lower() if verdict.reason is not None else ""


def _after(chunk_id: bytes, entries: Iterable[ChunkEntry]) -> Iterator[ChunkEntry]:
    """The catalog gives chunks in the order of their ids."""
    return itertools.dropwhile(lambda entry: entry.chunk_id <= chunk_id, entries)


async def _verify(
    session: Session,
    namespace: str | None,
    sample: float,
    seed: int,
    repair: bool,
    concurrency: int | None,
    state: Path | None,
) -> Summary:
    from s3kv.catalog.browse import temporary_catalog
    from s3kv.gc.verify import Summary, sampled, verify_chunks

    summary = Summary()
    progress = _Progress(state)
    async with opened_bucket(session.settings, namespace) as bucket:
        for spec in bucket.chosen:
            async with temporary_catalog(bucket.store, spec, session.settings.catalog) as catalog:
                entries = _after(progress.after(spec.name), catalog.iter_chunks())
                with session.meter(f"verify {spec.name[:8]}", catalog.stats()["chunks"]) as meter:
                    verdicts = verify_chunks(
                        bucket.store,
                        spec,
                        sampled(entries, sample, seed),
                        concurrency=concurrency or session.settings.fetch.concurrency,
                    )
                    async for verdict in verdicts:
                        summary.add(verdict)
                        if repair and verdict.reason is not None:  # before it counts as reached
                            await catalog.forget([verdict.chunk_id], verdict.reason)
                        progress.reached(spec.name, verdict.chunk_id)
                        meter.advance()
    progress.finished()
    return summary


class _Progress:
    """The last chunk id of each namespace that was read, in a small file. Without a file it remembers nothing.

    Raises typer.BadParameter, with nothing changed, for a path that holds anything else or cannot be written to: the
    file is replaced while chunks are read and removed at the end.
    """

    SAVE_EVERY = 64
    MAX_BYTES = 1 << 20

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._count = 0
        self._last: dict[str, str] = {}
        if path is None:
            return
        try:
            if os.path.lexists(path):
                self._last = self._read(path)
            temporary = self._written(path)  # before the bucket is read for hours
            temporary.unlink()
        except OSError as error:
            raise typer.BadParameter(f"{path}: {error.strerror or error}", param_hint="--state") from error

    @classmethod
    def _read(cls, path: Path) -> dict[str, str]:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            raise typer.BadParameter(f"{path} is no regular file", param_hint="--state")
        try:
            loaded = json.loads(path.read_text(encoding="utf-8")) if about.st_size <= cls.MAX_BYTES else None
        except (ValueError, RecursionError):
            loaded = None
        if not isinstance(loaded, dict) or not loaded or not all(map(_is_id, itertools.chain(*loaded.items()))):
            raise typer.BadParameter(f"{path} is no state of s3kv verify: it is left alone", param_hint="--state")
        return loaded

    def after(self, namespace: str) -> bytes:
        return bytes.fromhex(self._last.get(namespace, ""))

    def reached(self, namespace: str, chunk_id: bytes) -> None:
        self._last[namespace] = chunk_id.hex()
        self._count += 1
        if self._path is not None and self._count % self.SAVE_EVERY == 1:
            self._written(self._path).replace(self._path)

    def finished(self) -> None:
        """The next run begins anew."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _written(self, path: Path) -> Path:
        """A new file beside `path`, whose name nobody else has, with the present state."""
        descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        temporary = Path(name)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
                json.dump(self._last, file)
        except BaseException:
            temporary.unlink()
            raise
        return temporary


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None
