"""Numbers and times for people, and tables with one look. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from s3kv.settings import read_size

_STEP = 1024.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def size(count: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in _UNITS:
        if abs(count) < _STEP or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    raise AssertionError


def number(count: float) -> str:
    return f"{count:,.0f}"


def duration(seconds: float) -> str:
    """`5400` -> `1.5 h`; `0.004` -> `4.0 ms`; `0` -> `0 s`."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    for span, unit in _SPANS:
        if seconds >= span:
            return f"{seconds / span:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds else "0 s"


def moment(seconds: float) -> str:
    """Seconds since 1970 as UTC, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def parse_size(text: str) -> int:
    """As the settings read sizes: `10GiB`, `1.5TB`, `4096`. Raises ValueError."""
    if text.strip().isdecimal():
        return int(text)
    try:
        return read_size(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a size such as 500GiB") from None


def parse_duration(text: str) -> float:
    """`30d`, `12h`, `90s`, `45` (seconds). Raises ValueError."""
    value, unit = _split(text)
    if (unit or "s") not in SECONDS:
        raise ValueError(f"{text!r} is not a duration such as 30d, 12h or 90s")
    return value * SECONDS[unit or "s"]


def _split(text: str) -> tuple[float, str]:
    stripped = text.strip().lower().replace("_", "")
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
    try:
        value = float(digits)
    except ValueError:
        raise ValueError(f"{text!r} does not begin with a number") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{text!r} is out of range")
    return value, stripped[len(digits) :].strip()


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Columns whose name begins with ">" are numbers and stand to the right."""
    grid = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in columns:
        right = name.startswith(">")
        grid.add_column(name.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return grid


def bar(share: float, width: int = 20) -> str:
    """A bar for a histogram, `share` in 0..1."""
    return "█" * max(1 if share > 0 else 0, round(share * width))
