"""Plots of a run on a GPU: `python -m benchmarks.gpu.plots [RESULT.json]` writes docs/img/gpu-*.png.

Without an argument the newest benchmarks/results/gpu-*.json is read. Also prints the break-even lengths and how much
faster the conversations were, which docs/gpu.md names.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from benchmarks import RESULTS
from benchmarks.plots import save

DPI = 90
KIB = 1 << 10
Row = dict[str, Any]


def main(source: Path) -> None:
    result = json.loads(source.read_text())
    note = f"{result['device']}, {result['date']}"
    _copies(result["copies"]["rows"], note)
    _overhead(result["shape_8b"], result["calls"], note)
    _first_token(result["shape_8b"]["first_token"], note)
    _conversation(result["conversation"], note)


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


_CALL_GOALS = {"build_connector_meta": 300, "wait_for_save": 100, "get_finished": 20}


def _overhead(shape: Row, calls: Row, note: str) -> None:
    figure, (passes, decode, thread) = plt.subplots(1, 3, figsize=(9, 3.4), width_ratios=[1, 1, 1.5])
    _pair(passes, shape["pass"], "pass of 8,192 tokens")
    _pair(decode, shape["decode"], "decode step, 64 sequences")
    for place, name in enumerate(("without", "with")):
        values = shape["decode"]["all_ms"][name]
        decode.plot([place] * len(values), values, "k_", ms=16, label="segments" if place else None)
    decode.legend(fontsize=7, loc="lower right")
    for offset, kind in enumerate(("none completing", "8 completing")):
        values = [calls[kind][name]["median_us"] for name in _CALL_GOALS]
        bars = thread.bar([x + 0.4 * offset for x in range(3)], values, 0.38, color=f"C{7 - 7 * offset}", label=kind)
        thread.bar_label(bars, fmt="%.0f", fontsize=8)
    for x, goal in enumerate(_CALL_GOALS.values()):
        thread.plot([x + 0.2, x + 0.6], [goal, goal], "r-", lw=1, label=None if x else "goal with 8 completing")
    thread.set_xticks([x + 0.2 for x in range(3)], [name.replace("_", "_\n", 1) for name in _CALL_GOALS], fontsize=8)
    thread.set_ylabel("µs a call, median")
    thread.legend(fontsize=7, loc="upper right")
    thread.set_title("executor's thread, 256 requests", fontsize=9)
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


def _conversation(data: Row, note: str) -> None:
    """Every turn but the first ones, by the length of its prompt."""
    figure, (axes, total) = plt.subplots(1, 2, figsize=(9, 3.8), width_ratios=[2.2, 1])
    later = [row for row in data["rows"] if row["turn"]]
    lengths = [row["tokens"] / 1000 for row in later]
    axes.plot(lengths, [row["computed_s"] for row in later], "k.", ms=7, label="computed")
    sums = [data["cases"][0]["computed_s"], *(case["s3kv_s"] for case in data["cases"])]
    for number, case in enumerate(data["cases"]):
        axes.plot(
            lengths, [row["s3kv"][number]["s"] for row in later], f"C{number}x", ms=5, mew=1.3, label=case["name"]
        )
        gain = case["computed_s"] / case["s3kv_s"]
        print(f"{case['name']}: {gain:.2f} times faster in all, {case['faster']} of {len(later)} turns")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([2, 5, 10, 20, 50], ["2k", "5k", "10k", "20k", "50k"])
    axes.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5])
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.minorticks_off()
    axes.set_xlabel("tokens of a turn's prompt")
    axes.set_ylabel("seconds to the first token")
    axes.legend(fontsize=7, loc="upper left")
    names = [
        "computed",
        *(f"{case['bytes_per_s'] / 1e9:.0f} GB/s\n{case['wait_ms_per_1k_tokens']:.0f} ms" for case in data["cases"]),
    ]
    bars = total.bar(range(len(sums)), sums, color=["k", "C0", "C1", "C2"])
    total.bar_label(bars, fmt="%.1f s", fontsize=8)
    total.set_xticks(range(len(sums)), names, fontsize=8)
    total.set_ylim(0, 1.1 * sums[0])
    total.set_title(f"sum of the {len(later)} later turns", fontsize=9)
    share = data["tier_bytes"] / data["needed_bytes"]
    _save(figure, "gpu-conversation", f"Turns of a chat service's trace, tier {share:.0%} of what they need; {note}")


_SMALL: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7}


def _save(figure: Any, name: str, title: str) -> None:
    figure.suptitle(title, fontsize=9)
    save(figure, name, DPI)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else max(RESULTS.glob("gpu-*.json")))
