"""Plots for the docs from the results in hand: `python -m benchmarks.plots` writes docs/img/*.png."""

from __future__ import annotations

import json
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import RESULTS, ROOT
from benchmarks.harness import MIB

IMAGES = ROOT / "docs" / "img"
SIZE, DPI = (6.4, 3.6), 80
LINES = {"put s3kv": "C0-o", "put obstore": "C0--x", "get s3kv": "C1-o", "get obstore": "C1--x"}


def main() -> None:
    if store := _read("store"):
        sizes, places = store["data"].get("size", []), store["data"].get("concurrency", [])
        _throughput(sizes, "size", 1 / MIB, "MiB an object, 4 at once", "throughput-size", store)
        _throughput(places, "at_once", 1, "16 MiB objects at once", "throughput-concurrency", store)
    if growth := _read("growth"):
        _growth(growth, _read("snapshot"))


def _read(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def _throughput(
    points: list[dict[str, Any]], by: str, scale: float, label: str, name: str, result: dict[str, Any]
) -> None:
    if not points:
        return
    figure, axes = plt.subplots(figsize=SIZE)
    for line, style in LINES.items():
        axes.plot([each[by] * scale for each in points], [each[line] for each in points], style, label=line)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(label)
    axes.set_ylabel("MB/s")
    axes.set_title(f"nginx on tmpfs, no TLS; {_when(result)}", fontsize=9)
    axes.legend(fontsize=7)
    save(figure, name, DPI)


def _growth(result: dict[str, Any], snapshot: dict[str, Any] | None) -> None:
    figure, axes = plt.subplots(figsize=SIZE)
    for what, found in result["data"].items():
        first, last = found["points"]
        factors = [1, last["size"] / first["size"]]
        axes.plot(factors, [1, last["cpu_s"] / first["cpu_s"]], "-o", label=f"{what}: {found['unit']}")
    loads = sorted((int(blocks), each["cpu"]) for blocks, each in (snapshot or {"data": {}})["data"].items())
    if len(loads) == 2:
        factors = [1, loads[1][0] / loads[0][0]]
        axes.plot(factors, [1, loads[1][1] / loads[0][1]], "-o", label="load of a snapshot: blocks")
    axes.plot([1, 10], [1, 10], "k:", label="linear")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("times the blocks, chunks or agents")
    axes.set_ylabel("times the CPU")
    axes.set_title(_when(result), fontsize=9)
    axes.legend(fontsize=7)
    save(figure, "growth", DPI)


def _when(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['cores']} cores, load {result['load_before']} before; {result['date'][:10]}, {result['commit']}"


def save(figure: Any, name: str, dpi: int) -> None:
    """Writes docs/img/NAME.png, every axes with a grid, and closes the figure."""
    for axes in figure.axes:
        axes.grid(True, alpha=0.3)
    figure.tight_layout()
    IMAGES.mkdir(parents=True, exist_ok=True)
    target = IMAGES / f"{name}.png"
    figure.savefig(target, dpi=dpi)
    plt.close(figure)
    print(target.relative_to(ROOT), f"{target.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
