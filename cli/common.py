"""Options that every command takes, before or after its name, and how a function becomes a command."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from .session import Command, Session, error_boundary, parse_overrides

F = TypeVar("F", bound=Command)

_PANEL = "Common options"

Config = Annotated[
    Path | None,
    typer.Option("--config", help="Settings file (or S3KV_CONFIG).", rich_help_panel=_PANEL, metavar="FILE"),
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store", help="store.url: s3://bucket/prefix or file:///folder.", rich_help_panel=_PANEL, metavar="URL"
    ),
]
Region = Annotated[str | None, typer.Option("--region", help="store.region.", rich_help_panel=_PANEL, metavar="REGION")]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint", help="store.endpoint.", rich_help_panel=_PANEL, metavar="URL")
]
Profile = Annotated[
    str | None, typer.Option("--profile", help="store.profile.", rich_help_panel=_PANEL, metavar="NAME")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting: section.name=value.", rich_help_panel=_PANEL, metavar="NAME=VALUE"),
]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.", rich_help_panel=_PANEL)]

COMMON: dict[str, tuple[Any, Any]] = {
    "config": (Config, None),
    "store": (StoreUrl, None),
    "region": (Region, None),
    "endpoint": (Endpoint, None),
    "profile": (Profile, None),
    "set_": (Set, None),
    "json": (Json, False),
}
_STORE_FIELDS = {"store": "url", "region": "region", "endpoint": "endpoint", "profile": "profile"}


def make_session(ctx: typer.Context, own: dict[str, Any]) -> Session:
    """The session of a command: its own options win over those given before its name."""
    outer: dict[str, Any] = ctx.find_root().obj or {}
    pairs = [*(outer.get("set_") or ()), *(own.get("set_") or ())]
    overrides = parse_overrides(pairs)
    for option, setting in _STORE_FIELDS.items():
        value = own[option] if own.get(option) is not None else outer.get(option)
        if value is not None:
            overrides.setdefault("store", {})[setting] = value
    return Session(
        config=own["config"] if own.get("config") is not None else outer.get("config"),
        overrides=overrides,
        json=bool(own.get("json") or outer.get("json")),
    )


def refuse_empty(ctx: typer.Context) -> None:
    """Raises typer.BadParameter for an option with nothing in it: a shell variable that was not set, as in
    `--namespace "$NAME"`, must not pass for an option that was left out, which means all of them. Every path is a file,
    which "." (an empty one, as typer reads it) cannot be."""
    for parameter in ctx.command.params:
        if parameter.param_type_name == "option" and ctx.params.get(parameter.name or "") in ("", Path()):
            raise typer.BadParameter("is empty: give a value, or leave the option out", param_hint=parameter.opts[0])


def command(app: typer.Typer, name: str, *, example: str) -> Callable[[F], F]:
    """Registers `function(session, ...)` as a command with the common options, an example and the error boundary."""

    def register(function: F) -> F:
        @functools.wraps(function)
        def wrapper(ctx: typer.Context, **values: Any) -> None:
            own = {key: values.pop(key) for key in COMMON}
            refuse_empty(ctx)
            with error_boundary():
                function(make_session(ctx, own), **values)

        _describe(wrapper, function)
        epilog = "Example: " + "\n\n".join(example.strip().splitlines())
        app.command(name, epilog=epilog)(wrapper)
        return function

    return register


def _describe(wrapper: Any, function: Command) -> None:
    """The signature typer reads: the context, the function's own parameters, then the common ones."""
    hints = get_type_hints(function, include_extras=True)
    own = list(inspect.signature(function).parameters.values())[1:]
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("ctx", kind, annotation=typer.Context)]
    parameters += [each.replace(kind=kind, annotation=hints[each.name]) for each in own]
    parameters += [inspect.Parameter(n, kind, annotation=a, default=d) for n, (a, d) in COMMON.items()]
    wrapper.__signature__ = inspect.Signature(parameters)
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    del wrapper.__wrapped__  # inspect would follow it past the signature above


WEEK_S, CENTURY_S = 7 * 86400.0, 36525 * 86400.0


def read_duration(text: str, option: str, *, at_most_s: float = CENTURY_S, zero: bool = True) -> float:
    """The seconds that `option` names. Raises typer.BadParameter; no number that a clock or socket cannot take."""
    from .text import duration, parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if seconds > at_most_s:
        raise typer.BadParameter(f"{text!r} is more than {duration(at_most_s)}", param_hint=option)
    if not (seconds or zero):
        raise typer.BadParameter("must be more than 0", param_hint=option)
    return seconds


def read_size(text: str, option: str, *, at_least: int = 0, at_most: int = 1 << 60) -> int:
    """The bytes that `option` names. Raises typer.BadParameter."""
    from .text import parse_size, size

    try:
        count = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if not at_least <= count <= at_most:
        raise typer.BadParameter(f"{text!r} is not {size(at_least)} to {size(at_most)}", param_hint=option)
    return count


def check_finite(value: float, option: str) -> None:
    """Limits do not catch nan, which is neither below nor above them. Raises typer.BadParameter."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to reckon with", param_hint=option)


def group(name_help: str) -> typer.Typer:
    """An empty family of commands."""
    return typer.Typer(help=name_help, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
