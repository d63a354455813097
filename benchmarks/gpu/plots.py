"""Plots of a run on a GPU: `python -m benchmarks.gpu.plots [RESULT.json]` writes docs/img/gpu-*.png.

Without an argument the newest benchmarks/results/gpu-*.json is read. Also prints the break-even lengths and the
medians of the turns that docs/gpu.md names.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import RESULTS, ROOT

IMAGES = ROOT / "docs" / "img"
DPI = 90
KIB = 1 << 10
Row = dict[str, Any]


def main(source: Path) -> None:
    result = json.loads(source.read_text())
    IMAGES.mkdir(parents=True, exist_ok=True)
    note = f"{result['device']}, {result['date']}"
    _copies(result["copies"]["rows"], note)
    _overhead(result["shape_8b"], note)
    _first_token(result["shape_8b"]["first_token"], note)
    _conversation(result["conversation"], result["shape_8b"]["first_token"], note)


def break_even(lengths: Sequence[int], computed: Sequence[float], loaded: Sequence[float]) -> float | None:
    """Tokens from which loading is faster, or None if it is slower at every length measured.

    The logarithm of computed / loaded is interpolated over the logarithm of the length: computing grows faster than
    linearly, so straight lines between points four or eight times apart would put the crossing too low.
    `lengths[0]` means: at or below it.
    """
    gains = [math.log(one / other) for one, other in zip(computed, loaded, strict=True)]
    if gains[0] >= 0:
        return float(lengths[0])
    places = [math.log(length) for length in lengths]
    for index in range(1, len(gains)):
        if gains[index] >= 0:
            share = -gains[index - 1] / (gains[index] - gains[index - 1])
            return math.exp(places[index - 1] + share * (places[index] - places[index - 1]))
    return None


def warm_prefill(rows: Sequence[Row]) -> tuple[float, float]:
    """(a, b) of a × tokens + b × tokens² seconds through the first two computed prompts."""
    (short, short_s), (long, long_s) = ((row["tokens"], row["computed_s"]) for row in rows[:2])
    square = (long_s / long - short_s / short) / (long - short)
    return short_s / short - square * short, square


def _copies(rows: Sequence[Row], note: str) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    sizes = [row["page_bytes"] / KIB for row in rows]
    axes.plot(sizes, [row["limit_out_gbs"] for row in rows], "k--", lw=1, label="one large pinned copy, out")
    axes.plot(sizes, [row["limit_in_gbs"] for row in rows], "k:", lw=1, label="one large pinned copy, in")
    axes.plot(sizes, [row["save_gbs"] for row in rows], "C0-o", label="save: ring to slots")
    axes.plot(sizes, [row["load_gbs"] for row in rows], "C1-s", label="load: slots to pages")
    goals = [(0.85 if size < 256 else 0.93) * row["limit_out_gbs"] for size, row in zip(sizes, rows, strict=True)]
    axes.plot(sizes[:1], goals[:1], "r_", ms=14, mew=2)
    axes.plot(sizes[2:], goals[2:], "r-", lw=1, label="goal: 0.85 at 64 KiB, 0.93 from 256 KiB")
    for size, row in zip(sizes, rows, strict=True):
        beside = (18, -3) if size < 256 else (0, -12)
        axes.annotate(f"{row['save_ratio']:.2f}", (size, row["save_gbs"]), beside, ha="center", **_SMALL)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:.0f}" if size < 1024 else f"{size / 1024:.0f} Mi" for size in sizes])
    axes.set_ylim(40, 58)
    axes.set_xlabel("page, KiB (axis of GB/s begins at 40; numbers: save as a share of the limit)", fontsize=8)
    axes.set_ylabel("GB/s")
    axes.legend(fontsize=7, loc="lower right")
    _save(figure, "gpu-copies", f"Copies of 1 GiB between device and arena; {note}")


def _overhead(shape: Row, note: str) -> None:
    figure, (passes, decode, calls) = plt.subplots(1, 3, figsize=(9, 3.4), width_ratios=[1, 1, 1.5])
    _pair(passes, shape["pass"], "pass of 8,192 tokens")
    _pair(decode, shape["decode"], "decode step, 64 sequences")
    for place, name in enumerate(("without", "with")):
        values = shape["decode"]["all_ms"][name]
        decode.plot([place] * len(values), values, "k_", ms=16, label="segments" if place else None)
    decode.legend(fontsize=7, loc="lower right")
    names = ["start_load_kv", "wait_for_save", "get_finished"]
    for offset, (side, label) in enumerate((("idle", "idle connector"), ("s3kv", "s3kv"))):
        values = [shape["calls_us"][side][name] for name in names]
        bars = calls.bar([x + 0.4 * offset for x in range(3)], values, 0.38, color=f"C{7 - 7 * offset}", label=label)
        calls.bar_label(bars, fmt="%.1f", fontsize=8)
    calls.set_xticks([x + 0.2 for x in range(3)], names, fontsize=8)
    calls.set_ylabel("µs a call, median")
    calls.set_ylim(0, 23)
    calls.legend(fontsize=7, loc="upper left")
    calls.set_title("executor's thread", fontsize=9)
    _save(figure, "gpu-overhead", f"With s3kv and with an idle connector; {note}")


def _pair(axes: Any, values: Row, title: str) -> None:
    bars = axes.bar(["idle", "s3kv"], [values["without_ms"], values["with_ms"]], 0.6, color=["C7", "C0"])
    axes.bar_label(bars, fmt="%.1f", label_type="center", color="white", fontsize=9)
    axes.set_ylabel("ms, median")
    axes.set_ylim(0, 1.15 * max(values["with_ms"], values["without_ms"]))
    axes.set_title(f"{title}\nratio {values['ratio']:.4f}", fontsize=9)


def _first_token(rows: Sequence[Row], note: str) -> None:
    figure, axes = plt.subplots(figsize=(8.6, 4))
    lengths, computed = [row["tokens"] for row in rows], [row["computed_s"] for row in rows]
    axes.plot(lengths, computed, "k-o", lw=2, label="computed")
    for index, case in enumerate(rows[0]["bucket"]):
        seconds = [row["bucket"][index]["s"] for row in rows]
        found = break_even(lengths, computed, seconds)
        network = _network(case)
        axes.plot(lengths, seconds, f"C{index}--x", lw=1.2, label=f"bucket, {network}: {_place(found, lengths)}")
        print(f"break-even, {network}: {_place(found, lengths)}")
        if found and found > lengths[0]:
            height = math.exp(_interpolated(lengths, seconds, found))
            axes.plot([found], [height], "r*", ms=11, zorder=5)
    axes.plot(lengths, [row["tier_s"] for row in rows], "C8-s", lw=2, label="node's tier: by 4k")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length // KIB}k" for length in lengths])
    axes.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20])
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.minorticks_off()
    axes.set_xlabel("tokens of the prompt (in the legend: from where loading is faster)")
    axes.set_ylabel("seconds to the first token")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    _save(figure, "gpu-first-token", f"Time to first token, 8B shape; {note}")


def _interpolated(lengths: Sequence[int], seconds: Sequence[float], at: float) -> float:
    for index in range(1, len(lengths)):
        if at <= lengths[index]:
            low, high = math.log(lengths[index - 1]), math.log(lengths[index])
            share = (math.log(at) - low) / (high - low)
            return (1 - share) * math.log(seconds[index - 1]) + share * math.log(seconds[index])
    return math.log(seconds[-1])


def _network(case: Row) -> str:
    cap = f"{case['bytes_per_s'] / 1e9:.0f} GB/s" if case["bytes_per_s"] else "no cap"
    return f"{1e3 * case['latency_s']:.0f} ms, {cap}"


def _place(found: float | None, lengths: Sequence[int]) -> str:
    if found is None:
        return f"above {lengths[-1] // KIB}k"
    return f"by {lengths[0] // KIB}k" if found <= lengths[0] else f"{found:,.0f} tokens"


def _conversation(data: Row, prompts: Sequence[Row], note: str) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 4))
    turns = range(data["turns"])
    by_turn = [[row for row in data["rows"] if row["turn"] == turn] for turn in turns]
    top = 0.42
    for key, style, shift, label in (
        ("computed_s", "C7", -0.1, "computed, each length for the first time"),
        ("s3kv_s", "C0", 0.1, "s3kv, right after it"),
    ):
        for turn, rows in zip(turns, by_turn, strict=True):
            axes.plot([turn + shift] * len(rows), [row[key] for row in rows], ".", color=style, alpha=0.4)
            if high := [row[key] for row in rows if row[key] > top]:
                axes.annotate(f"one at {high[0]:.2f} s ↑", (turn + shift, top), (0, -10), ha="center", **_SMALL)
        medians = [statistics.median(row[key] for row in rows) for rows in by_turn]
        axes.plot([turn + shift for turn in turns], medians, "-o", color=style, label=f"{label} (median)")
        print(key, [round(each, 3) for each in medians])
    linear, square = warm_prefill(prompts)
    lengths = [statistics.median(row["tokens"] for row in rows) for rows in by_turn]
    warm = [linear * length + square * length**2 for length in lengths]
    print("warm prefill at the median length", [round(each, 3) for each in warm])
    axes.plot(turns, warm, "k--", lw=1, label="estimate: computed with lengths seen before")
    loaded = [statistics.median(row["loaded"] for row in rows) for rows in by_turn]
    names = [
        f"{turn}\n{length / 1e3:.1f}k\n{have / 1e3:.1f}k"
        for turn, length, have in zip(turns, lengths, loaded, strict=True)
    ]
    axes.set_xticks(turns, names, fontsize=8)
    axes.set_ylim(0, top)
    axes.set_xlabel("turn / tokens of the prompt / of these loaded (medians); turn 0 loads nothing", fontsize=8)
    axes.set_ylabel("seconds to the first token")
    axes.legend(fontsize=7, loc="upper left")
    share = data["tier_bytes"] / data["needed_bytes"]
    network = _network(data)
    _save(figure, "gpu-conversation", f"Conversations, tier {share:.0%} of what they need, bucket {network}; {note}")


_SMALL: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7}


def _save(figure: Any, name: str, title: str) -> None:
    figure.suptitle(title, fontsize=9)
    for axes in figure.axes:
        axes.grid(True, alpha=0.3)
    figure.tight_layout()
    target = IMAGES / f"{name}.png"
    figure.savefig(target, dpi=DPI)
    plt.close(figure)
    print(target.relative_to(ROOT), f"{target.stat().st_size / KIB:.0f} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else max(RESULTS.glob("gpu-*.json")))
