"""The `s3kv` program: registers the command families; each lies in a file of its own."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from .common import COMMON, Config, Endpoint, Json, Profile, Region, Set, StoreUrl, refuse_empty
from .session import FINDING, WRONG_USE, complain, discard_output, error_boundary, is_wrong_use

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
    code = 0
    try:
        with error_boundary():
            code = _run(argv)
    except typer.Exit as stop:
        code = stop.exit_code
    return _flushed(code)


def _run(argv: Sequence[str] | None) -> int:
    """Raises BrokenPipeError when nobody reads the output any more."""
    try:
        code = app(args=list(argv) if argv is not None else None, prog_name="s3kv", standalone_mode=False)
    except typer.Abort:
        return FINDING
    except SystemExit as stop:
        if stop.code == 1:  # how typer and rich end when the reader has gone, and nothing else does here
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from None
        return stop.code if isinstance(stop.code, int) else 0
    except Exception as error:
        if not is_wrong_use(error):
            raise
        from typer.rich_utils import rich_format_error

        rich_format_error(error)  # type: ignore[arg-type]
        return getattr(error, "exit_code", WRONG_USE)
    return code if isinstance(code, int) else 0


def _flushed(code: int) -> int:
    """The exit code once the output is out: Python's own flush, later, would complain in its own way or not at all."""
    try:
        sys.stdout.flush()
    except OSError as error:
        discard_output()
        if error.errno != errno.EPIPE and code == 0:
            complain(f"standard output: {error.strerror or error}")
            return FINDING
    return code


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
