"""Writes the results in hand into README.md: `python -m benchmarks.table`."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.__main__ import NAMES
from benchmarks.harness import short

README = ROOT / "benchmarks" / "README.md"
BEGIN, END = "<!-- results: python -m benchmarks.table -->", "<!-- end of results -->"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n\n{_results()}\n{END}{after}", encoding="utf-8")


def _results() -> str:
    parts = []
    for name in NAMES:
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(_section(name, json.loads(path.read_text())))
    return "\n".join(parts)


def _section(name: str, found: dict[str, Any]) -> str:
    head = f"**{name}**: {found['title']} ({found['date'][:10]}, {found['commit']}, load {found['load_before']})"
    lines = [
        head,
        "",
        "| | figure | limit or peer | its figure | ratio | goal | |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for row in found["rows"]:
        if row["goal"] is None and row["ratio"] is None:
            continue
        peer = "" if row["peer_figure"] is None else f"{short(row['peer_figure'])} {row['unit']}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        verdict = {None: "", True: "met", False: "**missed**"}[row["met"]]
        cells = [row["what"].strip(), f"{short(row['figure'])} {row['unit']}", row["peer"], peer, ratio]
        lines.append("| " + " | ".join([*cells, row["goal"] or "", verdict]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
