"""What every command shares: the settings in force, output for people or programs, and one boundary for errors.

Nothing heavy is imported here: `s3kv --help` must not wait for an object-store client.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from s3kv.settings import Settings

    from .progress import Meter

FINDING = 1
WRONG_USE = 2
INTERRUPTED = 130
TRACEBACK_VARIABLE = "S3KV_TRACEBACK"
_PIPE_WIDTH = 120

T = TypeVar("T")


@dataclass
class Session:
    """One run of one command."""

    config: Path | None = None
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    json: bool = False
    repeats: bool = False
    """Results follow one another: each is out at once and, as JSON, a line of its own."""

    @cached_property
    def settings(self) -> Settings:
        """Raises ConfigError that names the setting."""
        from s3kv.settings import load_settings

        return load_settings(self.config, **self.overrides)

    @cached_property
    def out(self) -> Console:
        return _console(stderr=False)

    @cached_property
    def err(self) -> Console:
        return _console(stderr=True)

    @property
    def interactive(self) -> bool:
        return sys.stdin.isatty() and sys.stderr.isatty()

    def emit(self, data: Any, *renderables: object) -> None:
        """`data` as JSON with --json, else what a person reads."""
        if self.json:
            self.print_json(data)
            return
        for each in renderables:
            self.out.print(each)

    def print_json(self, data: Any) -> None:
        import json

        sys.stdout.write(json.dumps(data, indent=None if self.repeats else 2, default=_plain) + "\n")
        if self.repeats:
            sys.stdout.flush()

    def say(self, text: str) -> None:
        """Something for the person at the terminal that is no result: to stderr, never into a pipe's data."""
        self.err.print(text, markup=False, highlight=False, soft_wrap=True)

    async def confirm(self, question: str, *, yes: bool) -> None:
        """Ends the command with 1 unless the person agrees. Without a terminal only --yes agrees."""
        if yes:
            return
        if not sys.stdin.isatty():
            self.say("s3kv: nothing was changed: add --yes to go ahead without a terminal to ask")
            raise typer.Exit(FINDING)
        if not await self._agreed(question):
            self.say("s3kv: nothing was changed")
            raise typer.Exit(FINDING)

    async def _agreed(self, question: str) -> bool:
        """An answer at the terminal. No input and an empty line are a no."""
        from .waiting import in_daemon

        while True:
            sys.stderr.write(f"{question} [y/N]: ")
            sys.stderr.flush()
            try:
                # Not through sys.stdin: Python could not end while another thread reads from that.
                typed = await in_daemon(os.read, sys.stdin.fileno(), 1024)
            except asyncio.CancelledError:
                self.say("")  # what follows begins a line of its own
                raise
            if not typed.endswith(b"\n"):
                self.say("")
            answer = typed.decode(errors="replace").strip().lower()
            if answer in ("", "n", "no", "y", "yes"):
                return answer.startswith("y")
            self.say("s3kv: answer y or n")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs to the end. SIGTERM cancels the work, which may then tidy up, and ends the command like Ctrl-C does."""
        return asyncio.run(_until_terminated(work))

    @contextmanager
    def meter(self, title: str, total: int | None = None, *, size: bool = False) -> Iterator[Meter]:
        """A progress bar on stderr once the work takes over a second; none when stderr is no terminal."""
        from .progress import running_meter

        with running_meter(self.err, title, total, size=size, visible=not self.json) as meter:
            yield meter


async def _until_terminated(work: Coroutine[Any, Any, T]) -> T:
    terminated = False
    task = asyncio.ensure_future(work)

    def stop() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    loop = asyncio.get_running_loop()
    with suppress(RuntimeError, ValueError):  # not in the main thread: then nobody can send it a signal either
        loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if terminated:
            raise KeyboardInterrupt from None
        raise
    finally:
        with suppress(RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGTERM)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else _PIPE_WIDTH
    # Names of keys, models and prompts are printed as they are, also when they look like rich's markup.
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "_asdict"):
        return value._asdict()
    return str(value)


@contextmanager
def error_boundary() -> Iterator[None]:
    """Failures become one line on stderr and an exit code; a traceback is shown only with S3KV_TRACEBACK=1."""
    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            discard_output()  # its reader has gone: nothing is wrong
            raise typer.Exit(0) from None
        _fail(error)
    except Exception as error:
        if _is_control_flow(error):
            raise
        _fail(error)


def discard_output() -> None:
    """What is still to be written goes nowhere: Python must not try again, and complain, when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError):  # no file at all
        os.dup2(null, sys.stdout.fileno())
    os.close(null)


def is_wrong_use(error: Exception) -> bool:
    return any(cls.__name__ == "ClickException" for cls in type(error).__mro__)


def _is_control_flow(error: Exception) -> bool:
    """Exit, Abort and usage errors are typer's to handle, whichever click it carries."""
    return any(cls.__name__ in ("Exit", "Abort", "ClickException") for cls in type(error).__mro__)


def _fail(error: Exception) -> None:
    if os.environ.get(TRACEBACK_VARIABLE):
        raise error
    from s3kv.errors import S3kvError

    if isinstance(error, S3kvError):
        complain(str(error))
    elif isinstance(error, OSError):
        complain(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))
    elif isinstance(error, ExceptionGroup):
        return _fail(error.exceptions[0])
    else:
        complain(f"internal error: {type(error).__name__}: {error} (set {TRACEBACK_VARIABLE}=1 for the traceback)")
    raise typer.Exit(FINDING) from None


def complain(text: str) -> None:
    with suppress(OSError):  # nobody listens: the exit code says it still
        sys.stderr.write("s3kv: " + " ".join(text.split()) + "\n")


def parse_overrides(pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`section.name=value` (value as YAML) to what `load_settings` takes. Raises typer.BadParameter."""
    overrides: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        section, dot, key = name.partition(".")
        if not separator or not dot or not key:
            raise typer.BadParameter(f"{pair!r} is not section.name=value", param_hint="--set")
        from s3kv.settings import read_yaml

        try:
            overrides.setdefault(section, {})[key] = read_yaml(value)
        except ValueError as error:
            raise typer.BadParameter(f"the value of {name!r}: {error}", param_hint="--set") from error
    return overrides


Command = Callable[..., None]
"""What a family registers: `function(session, **options)`."""
