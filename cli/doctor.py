"""`s3kv doctor`: is everything here that s3kv needs, and what to do where it is not."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from .common import command
from .session import FINDING, Session

if TYPE_CHECKING:
    from s3kv.settings import Settings
    from s3kv.store.probe import Check

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
_PACKAGES = ("s3kv-cache", "obstore", "boto3", "torch", "tensorrt_llm", "cuda-python")


def register(root: typer.Typer) -> None:
    command(root, "doctor", example="s3kv doctor --store s3://my-kv/prod --region eu-west-1")(doctor)


def doctor(session: Session) -> None:
    """Tries what s3kv needs: settings, store (each call, under a scratch key), clock, memory, agent, versions.

    Each finding comes with its remedy. Exit code 1 when something fails; warnings alone give 0.
    """
    from .text import table

    checks = [*_settings_checks(session.settings), *session.run(_store_checks(session.settings))]
    checks += [*_memory_checks(session.settings), _agent_check(session.settings), _versions()]
    rows = [(Text(each.grade, style=_COLOURS[each.grade]), each.name, each.detail, each.remedy) for each in checks]
    data = [{"check": c.name, "grade": c.grade, "detail": c.detail, "remedy": c.remedy} for c in checks]
    session.emit({"checks": data}, table(None, ("", "check", "finding", "what to do"), rows))
    if any(each.grade == "fail" for each in checks):
        raise typer.Exit(FINDING)


def _settings_checks(settings: Settings) -> Iterator[Check]:
    from s3kv.store.keys import parse_url
    from s3kv.store.probe import Check

    store = settings.store
    location = parse_url(store.url)
    yield Check("settings", "ok", f"{store.url}" + (f" at {store.endpoint}" if store.endpoint else ""))
    if location.scheme != "s3":
        return
    if store.endpoint and store.endpoint.startswith("http://"):
        yield Check("TLS", "warn", "the endpoint is plain HTTP", "use https:// where others share the network")
    elif not store.tls_verify:
        yield Check(
            "TLS", "warn", "certificates are not verified", "name the CA in store.ca_bundle; store.tls_verify: true"
        )
    else:
        yield Check("TLS", "ok", "certificates are verified" + (f" by {store.ca_bundle}" if store.ca_bundle else ""))


async def _store_checks(settings: Settings) -> list[Check]:
    from s3kv.store import open_store
    from s3kv.store.keys import SCRATCH_PREFIX
    from s3kv.store.probe import Probe

    store = open_store(settings.store)
    try:
        prefix = f"{SCRATCH_PREFIX}doctor-{secrets.token_hex(8)}/"
        probe = Probe(store, settings.store, prefix, clock=time.monotonic, wall_clock=time.time)  # noqa: TID251
        return await probe.run()
    finally:
        await store.close()


def _memory_checks(settings: Settings) -> Iterator[Check]:
    from s3kv.store.probe import Check
    from s3kv.tier.host import read_host_memory

    from .text import size

    memory = read_host_memory()
    wanted = settings.tier.capacity_bytes
    limits = [each for each in (memory.available, memory.control_group) if each is not None]
    room = min(limits, default=None)
    text = f"tier.capacity_bytes is {size(wanted)}" + (f", {size(room)} can be had" if room is not None else "")
    if room is not None and wanted > room:
        yield Check(
            "memory", "fail", text, "lower tier.capacity_bytes (or S3KV_TIER__CAPACITY_BYTES), or give more memory"
        )
    else:
        yield Check("memory", "ok", text)
    if memory.locked is not None and memory.locked < wanted and settings.tier.pin != "never":
        remedy = "if registering with CUDA fails: ulimit -l unlimited, or --ulimit memlock=-1 for a container"
        yield Check("locked memory", "warn", f"the limit is {size(memory.locked)}", remedy)
    else:
        yield Check("locked memory", "ok", "no limit in the way")


def _agent_check(settings: Settings) -> Check:
    from s3kv.client.connection import Connection
    from s3kv.errors import AgentUnavailable
    from s3kv.store.probe import Check

    try:
        connection = Connection.open(settings.agent.socket, "cli", timeout_s=2.0, trusted=settings.agent.trusted_uid)
    except AgentUnavailable as error:
        if isinstance(error.__cause__, FileNotFoundError):
            remedy = "none needed before an engine runs: it starts one, or run s3kv agent run"
            return Check("agent", "warn", f"none at {settings.agent.socket}", remedy)
        return Check("agent", "fail", str(error), f"see {settings.agent.socket.with_suffix('.log')}, or s3kv agent run")
    connection.close()
    return Check("agent", "ok", f"version {connection.version} answers at {settings.agent.socket}")


def _versions() -> Check:
    from importlib import metadata

    from s3kv.store.probe import Check

    found: list[Any] = [f"Python {sys.version.split()[0]}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return Check("versions", "ok", ", ".join(found))
