"""`s3kv bucket create | check | usage | list | delete`, and `s3kv usage`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import command, group
from .opening import Bucket, Namespace, opened_bucket, opened_store
from .session import FINDING, Session

if TYPE_CHECKING:
    from s3kv.gc.removal import Removed
    from s3kv.gc.usage import Usage
    from s3kv.settings import StoreSettings
    from s3kv.store.keys import Location

app = group("The bucket: making it, checking it, and what is in it.")

Encryption = Annotated[str, typer.Option(help="AES256 or aws:kms.")]
KmsKey = Annotated[str | None, typer.Option(help="ARN of the KMS key, with aws:kms.", metavar="ARN")]
ExpiryDays = Annotated[int, typer.Option(min=1, help="Lifecycle: chunks expire after so many days.")]


def register(root: typer.Typer) -> None:
    root.add_typer(app, name="bucket")
    command(root, "usage", example="s3kv usage --namespace llama --json")(usage)


@command(app, "create", example="s3kv bucket create --store s3://my-kv/prod --region eu-west-1")
def create(
    session: Session, encryption: Encryption = "AES256", kms_key: KmsKey = None, expiry_days: ExpiryDays = 90
) -> None:
    """Makes the bucket as the Terraform module does, or changes an existing one until it is so. May be repeated."""
    store, location = _where(session)
    if location.scheme == "file":
        changed = [] if Path(location.root).is_dir() else ["folder"]
        session.run(_open_and_close(session))
    else:
        changed = _create_s3(store, encryption, kms_key, expiry_days)
    session.emit(
        {"store": store.url, "changed": changed},
        f"{store.url}: " + (f"set {', '.join(changed)}" if changed else "already as it should be"),
    )


def _where(session: Session) -> tuple[StoreSettings, Location]:
    from s3kv.store.keys import parse_url

    return session.settings.store, parse_url(session.settings.store.url)


async def _open_and_close(session: Session) -> None:
    async with opened_store(session.settings):
        pass


def _create_s3(store: StoreSettings, encryption: str, kms_key: str | None, expiry_days: int) -> list[str]:
    from s3kv.store.admin import create_bucket
    from s3kv.store.admin_client import admin_client, bucket_spec

    spec = bucket_spec(store, encryption=_encryption(encryption), kms_key=kms_key, expiry_days=expiry_days)
    return create_bucket(spec, admin_client(store))


def _encryption(value: str) -> str:
    if value not in ("AES256", "aws:kms"):
        raise typer.BadParameter(f"{value!r} is neither AES256 nor aws:kms", param_hint="--encryption")
    return value


@command(app, "check", example="s3kv bucket check --store s3://my-kv/prod")
def check(
    session: Session,
    exact: Annotated[
        bool, typer.Option("--exact", help="Also report other, consistent choices of days and keys.")
    ] = False,
) -> None:
    """Compares the bucket with what s3kv needs and says what to change. Exit code 1 when something is to be changed."""
    from .text import table

    store, location = _where(session)
    findings = _check_folder(Path(location.root)) if location.scheme == "file" else _check_s3(store, exact)
    rows = [(f["property"], f["expected"], f["found"], f["remedy"]) for f in findings]
    session.emit(
        {"store": store.url, "findings": findings},
        table(None, ("property", "needed", "found", "what to do"), rows)
        if rows
        else f"{store.url} is as s3kv needs it.",
    )
    if findings:
        raise typer.Exit(FINDING)


def _check_s3(store: StoreSettings, exact: bool) -> list[dict[str, str]]:
    from s3kv.store.admin import check_bucket
    from s3kv.store.admin_client import admin_client, bucket_spec

    found = check_bucket(bucket_spec(store), admin_client(store), exact=exact)
    return [{"property": f.property, "expected": f.expected, "found": f.found, "remedy": f.remedy} for f in found]


def _check_folder(folder: Path) -> list[dict[str, str]]:
    def finding(what: str, expected: str, found: str, remedy: str) -> dict[str, str]:
        return {"property": what, "expected": expected, "found": found, "remedy": remedy}

    if not folder.is_dir():
        return [finding("folder", "exists", "missing", "run s3kv bucket create")]
    mode = folder.stat().st_mode & 0o777
    if mode & 0o007:
        return [finding("mode", "closed to others", f"{mode:04o}", f"chmod o-rwx {folder}: KV bytes tell the prompts")]
    return []


@command(app, "list", example="s3kv bucket list")
def list_(session: Session) -> None:
    """The namespaces in the bucket, readable: model, dtype, block size, layers, shards."""
    from .text import table

    found = session.run(_found(session))
    rows, data = [], []
    for spec in found.found.namespaces:
        windows = sorted({str(each.window) for each in spec.groups if each.window is not None})
        layers = sum(len(each.layers) for each in spec.groups)
        data.append(
            {
                "name": spec.name,
                "model": spec.model,
                "weights": spec.weights,
                "kv_dtype": spec.kv_dtype,
                "quantization": spec.quantization,
                "tokens_per_block": spec.tokens_per_block,
                "layer_groups": len(spec.groups),
                "layers": layers,
                "shards": spec.shards,
                "extra": dict(spec.extra),
            }
        )
        groups = f"{len(spec.groups)}" + (f" (windows {', '.join(windows)})" if windows else "")
        rows.append((spec.name[:8], spec.model, spec.kv_dtype, spec.tokens_per_block, groups, layers, spec.shards))
    columns = ("name", "model", "dtype", ">block tokens", ">layer groups", ">layers", ">shards")
    told: list[Any] = [table(None, columns, rows) if rows else "The bucket holds no namespace yet."]
    if found.found.unreadable:
        told.append(f"Without a description that fits: {', '.join(found.found.unreadable)}")
    session.emit({"namespaces": data, "unreadable": list(found.found.unreadable)}, *told)


async def _found(session: Session) -> Bucket:
    async with opened_bucket(session.settings, None) as bucket:
        return bucket


@command(app, "usage", example="s3kv bucket usage")
def bucket_usage(
    session: Session,
    namespace: Namespace = None,
    listing: Annotated[bool, typer.Option(help="Also list the bucket, so that nothing is missed.")] = True,
) -> None:
    """The same as `s3kv usage`."""
    usage(session, namespace, listing)


def usage(
    session: Session,
    namespace: Namespace = None,
    listing: Annotated[bool, typer.Option(help="Also list the bucket, so that nothing is missed.")] = True,
) -> None:
    """Bytes, objects, chunks and blocks by namespace; age and last use; growth; monthly cost by price.* settings."""
    from s3kv.gc.usage import cost

    usages = session.run(_usage(session, namespace, listing))
    price = cost(usages, session.settings.price)
    data = {
        "namespaces": [_usage_data(each) for each in usages],
        "cost_usd_month": {
            "storage": round(price.storage, 4),
            "puts": round(price.puts, 4),
            "total": round(price.total, 4),
        },
    }
    session.emit(
        data,
        *_usage_tables(usages),
        f"A month costs about ${price.total:,.2f}: storage ${price.storage:,.2f}, "
        f"puts ${price.puts:,.2f} (price.* settings).",
    )


async def _usage(session: Session, namespace: str | None, listing: bool) -> list[Usage]:
    from s3kv.catalog.browse import temporary_catalog
    from s3kv.gc.usage import list_stored, measure

    usages = []
    async with opened_bucket(session.settings, namespace) as bucket:
        with session.meter("namespaces", len(bucket.chosen)) as meter:
            for spec in bucket.chosen:
                async with temporary_catalog(bucket.store, spec, session.settings.catalog) as catalog:
                    now = time.time()  # noqa: TID251 - the CLI is where clocks come from
                    each = await asyncio.to_thread(measure, spec, catalog.iter_chunks(), now)
                if listing:
                    await list_stored(bucket.store, each)
                usages.append(each)
                meter.advance()
    return usages


def _usage_data(each: Usage) -> dict[str, Any]:
    from s3kv.gc.usage import BIN_NAMES

    return {
        "name": each.namespace.name,
        "model": each.namespace.model,
        "chunks": each.chunks,
        "blocks": each.blocks,
        "objects": each.objects,
        "bytes": each.bytes,
        "stored_objects": each.stored_objects,
        "stored_bytes": each.stored_bytes,
        "catalog_bytes": each.catalog_bytes,
        "age_bytes": dict(zip(BIN_NAMES, each.age.bytes, strict=True)),
        "last_use_bytes": dict(zip(BIN_NAMES, each.last_use.bytes, strict=True)),
        "added_bytes": {f"{days}d": size for days, size in each.added.items()},
    }


def _usage_tables(usages: list[Usage]) -> list[Any]:
    from s3kv.gc.usage import BIN_NAMES

    from .text import bar, number, size, table

    if not usages:
        return ["The bucket holds no namespace yet."]
    rows = [
        (
            each.namespace.name[:8],
            each.namespace.model,
            number(each.chunks),
            number(each.blocks),
            number(each.objects),
            size(each.bytes),
            "" if each.stored_bytes is None else size(each.stored_bytes),
            size(each.added[1]),
            size(each.added[7]),
            size(each.added[30]),
        )
        for each in usages
    ]
    columns = ("name", "model", ">chunks", ">blocks", ">objects", ">bytes", ">in bucket", ">+1 d", ">+7 d", ">+30 d")
    total = max(1, sum(each.bytes for each in usages))
    bins = []
    for index, name in enumerate(BIN_NAMES):
        age = sum(each.age.bytes[index] for each in usages)
        used = sum(each.last_use.bytes[index] for each in usages)
        bins.append((name, size(age), bar(age / total), size(used), bar(used / total)))
    return [table(None, columns, rows), "", table(None, ("", ">age", "", ">last use", ""), bins), ""]


@command(app, "delete", example="s3kv bucket delete --namespace 5f2c01aa")
def delete(
    session: Session,
    namespace: Namespace = None,
    everything: Annotated[bool, typer.Option("--everything", help="All of s3kv's objects under store.url.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go and change nothing.")] = False,
) -> None:
    """Deletes a namespace, or everything s3kv wrote under the prefix; shows it and asks. The bucket itself stays.

    Stop the agents that use it first: one that runs would go on to write.
    """
    if (namespace is None) == (not everything):
        raise typer.BadParameter("give either --namespace NAME or --everything")
    raise typer.Exit(session.run(_delete(session, namespace, yes, dry_run)))


async def _delete(session: Session, namespace: str | None, yes: bool, dry_run: bool) -> int:
    from s3kv.gc.removal import measure_prefixes, remove

    from .text import number, size, table

    async with opened_bucket(session.settings, namespace) as bucket:
        everything = namespace is None
        names = [spec.name for spec in bucket.chosen] + (list(_removable(bucket)) if everything else [])
        models = {spec.name: spec.model for spec in bucket.chosen}
        extents = await measure_prefixes(bucket.store, names, everything=everything)
        rows = [(models.get(e.prefix[3:-1], ""), e.prefix, number(e.objects), size(e.bytes)) for e in extents]
        plan = [{"prefix": e.prefix, "objects": e.objects, "bytes": e.bytes} for e in extents]
        total = sum(extent.objects for extent in extents)
        if not session.json:
            session.out.print(
                table(
                    f"To be deleted from {session.settings.store.url}", ("model", "prefix", ">objects", ">bytes"), rows
                )
            )
        removed = None
        if not dry_run:
            await session.confirm(f"Delete {number(total)} objects? This cannot be undone.", yes=yes)
            with session.meter("delete", total) as meter:
                removed = await remove(bucket.store, names, everything=everything, progress=meter.advance)
        return _tell_removed(session, plan, removed)


def _removable(bucket: Bucket) -> list[str]:
    """Folders under ns/ that have lost their description, but are named as namespaces are."""
    return [name for name in bucket.found.unreadable if len(name) == 32 and all(c in "0123456789abcdef" for c in name)]


def _tell_removed(session: Session, plan: list[dict[str, Any]], removed: Removed | None) -> int:
    from .text import number, table

    if removed is None:
        session.emit({"plan": plan, "dry_run": True}, "Dry run: nothing was changed.")
        return 0
    failures = [{"key": each.key, "error": str(each.error)} for each in removed.failures]
    told: list[Any] = [f"Deleted {number(removed.objects)} objects."]
    if failures:
        told.append(table(None, ("not deleted", "why"), [(f["key"], f["error"]) for f in failures[:20]]))
    session.emit({"plan": plan, "deleted_objects": removed.objects, "failures": failures}, *told)
    return FINDING if failures else 0
