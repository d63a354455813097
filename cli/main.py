"""The `s3kv` program: registers the command families; each lies in a file of its own."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from .common import COMMON, Config, Endpoint, Json, Profile, Region, Set, StoreUrl, refuse_empty
from .session import WRONG_USE

app = typer.Typer(
    name="s3kv",
    help="KV cache of TensorRT-LLM servers in object storage.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

FAMILIES = ("config", "objects", "bucket", "warm", "gc", "agent", "catalog", "doctor", "bench", "sim", "demo")
"""Modules with a `register(app)`; one that is not part of this installation is left out."""


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        sys.stdout.write(f"s3kv {version('s3kv-cache')}\n")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    config: Config = None,
    store: StoreUrl = None,
    region: Region = None,
    endpoint: Endpoint = None,
    profile: Profile = None,
    set_: Set = None,
    json: Json = False,
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """KV cache of TensorRT-LLM servers in object storage.

    Exit codes: 0 done, 1 a finding or a failure, 2 wrong use, 130 interrupted.
    """
    refuse_empty(ctx)
    ctx.obj = dict(
        zip(COMMON, (config, store, region, endpoint, profile, set_, json), strict=True),
    )


def _register() -> None:
    package = __package__ or "cli"
    for name in FAMILIES:
        if importlib.util.find_spec(f".{name}", package) is not None:
            module: Any = importlib.import_module(f".{name}", package)
            module.register(app)


_register()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code. The console script's entry point."""
    _prepare_streams()
    try:
        app(args=list(argv) if argv is not None else None, prog_name="s3kv")
    except SystemExit as stop:
        if isinstance(stop.code, int) or stop.code is None:
            return stop.code or 0
        sys.stderr.write(f"s3kv: {stop.code}\n")
        return WRONG_USE
    return 0


def _prepare_streams() -> None:
    """Some service managers start programs with stdout or stderr closed; Python has None for them then. And what the
    locale's encoding lacks is shown escaped, as Python does on stderr, instead of ending the command."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
