"""`s3kv demo`: the main job on real input, from an empty store to loaded prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import command
from .session import FINDING, Session

if TYPE_CHECKING:
    from s3kv.sim.demo import DemoResult

EXAMPLES = Path("examples/prompts.jsonl")
STEPS = 6
WANTED_FRACTION = 0.95


def register(root: typer.Typer) -> None:
    command(root, "demo", example="s3kv demo\ns3kv demo --store s3://bucket/demo --endpoint http://127.0.0.1:8333")(
        demo
    )


def demo(
    session: Session,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with id and prompt; default: examples/prompts.jsonl.", metavar="FILE"),
    ] = None,
) -> None:
    """Compute prompts once, end every process, start again, and load instead of compute.

    The model is a small real one on the CPU (the simulated runtime). The store is a temporary folder unless one is
    named. Exits with 1 if one generated token differs from a run without s3kv, or too little was loaded.
    """
    from s3kv.sim.demo import run_demo

    with _steps(session) as progress:
        result = run_demo(session.settings, prompts or _examples(), progress)
    session.emit(result.to_json(), *_tables(result), _verdict(result))
    if not result.tokens_identical or result.loaded_fraction < WANTED_FRACTION:
        raise typer.Exit(FINDING)


def _examples() -> Path:
    """The example prompts beside the working folder or, in a checkout, beside this package. Raises ConfigError."""
    from s3kv.errors import ConfigError

    found = [path for path in (EXAMPLES, Path(__file__).resolve().parent.parent / EXAMPLES) if path.is_file()]
    if not found:
        raise ConfigError(f"there is no {EXAMPLES} here: name a file of prompts with --prompts")
    return found[0]


def _verdict(result: DemoResult) -> str:
    loaded = f"{result.loaded_fraction:.1%} of the stored whole-block prompt tokens were loaded"
    if result.tokens_identical:
        return f"\nEvery generated token is identical to a run without s3kv; {loaded}."
    return f"\nWRONG TOKENS in {', '.join(result.differing)}; {loaded}."


def _tables(result: DemoResult) -> list[object]:
    from .text import size, table

    runs = (
        ("without s3kv", result.cold),
        ("computed once, saved", result.saving),
        ("restarted, loaded", result.warm),
        ("sharing only prefixes", result.prefix_only),
    )
    rows = [
        (name, run.prompts, run.prompt_tokens, run.loaded_tokens, run.computed_tokens, f"{1e3 * run.ttft_s:.0f} ms")
        for name, run in runs
    ]
    columns = ("run", ">prompts", ">prompt tokens", ">loaded", ">computed", ">time to first token")
    stored = [
        ("store", result.store),
        ("objects", result.objects),
        ("bytes stored", size(result.bytes_stored)),
        ("blocks an object", f"{result.blocks_per_object:.1f}"),
        ("compression", f"{result.compression:.2f} : 1"),
    ]
    return [table(None, columns, rows), "", table(None, ("storage", ""), stored)]


@contextmanager
def _steps(session: Session) -> Iterator[Callable[[str], None]]:
    """A progress bar over the steps on a terminal, a line for each elsewhere, nothing with --json."""
    if session.json:
        yield lambda text: None
        return
    if not session.err.is_terminal:
        yield session.say
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=session.err, transient=True) as bar:
        task = bar.add_task("starting", total=STEPS)
        yield lambda text: bar.update(task, advance=1, description=text)
