"""How much host memory this process can still get, by the machine's and its control groups' word."""

from __future__ import annotations

from pathlib import Path

from s3kv.errors import ConfigError
from s3kv.tier.host import control_group_rooms, meminfo, reader_below

MARGIN_FRACTION = 0.05
"""Of what is available, left for everything else on the node."""


def check_available(nbytes: int, root: Path = Path("/")) -> None:
    """Raises ConfigError naming `tier.capacity_bytes` unless `nbytes` fit with a margin. Unknown counts as enough."""
    available = available_bytes(root)
    if available is None:
        return
    usable = int(available * (1 - MARGIN_FRACTION))
    if nbytes > usable:
        raise ConfigError(
            f"tier.capacity_bytes: {nbytes} bytes were asked for, but this machine (or its control group) has "
            f"{usable} to give; set it lower"
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """The tightest of all limits that apply to this process; None if the machine tells nothing."""
    read = reader_below(root)
    figures = list(control_group_rooms(read))
    machine = meminfo(read).get("MemAvailable")
    if machine is not None:
        figures.append(machine)
    return max(0, min(figures)) if figures else None
