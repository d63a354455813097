"""Writes the tables of inputs and outputs in the module's README from its variables and outputs.

Reads what `terraform fmt` leaves: a block begins and ends at column 0, its attributes are indented by two spaces.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

MODULE = Path(__file__).resolve().parents[1]


class Block(NamedTuple):
    name: str
    description: str
    type: str
    default: str | None  # None: required


def blocks(text: str, kind: str) -> list[Block]:
    """The blocks of `kind` ("variable" or "output"), in order. Raises ValueError where one has no description."""
    found = []
    for match in re.finditer(rf'^{kind} "(\w+)" {{\n(.*?)^}}$', text, re.MULTILINE | re.DOTALL):
        name, body = match.groups()
        description = _attribute(body, "description")
        if description is None:
            raise ValueError(f'{kind} "{name}" has no description')
        text_of_it = description[1:-1].replace('\\"', '"')
        found.append(Block(name, text_of_it, _attribute(body, "type") or "", _attribute(body, "default")))
    return found


def _attribute(body: str, name: str) -> str | None:
    """The value of an attribute in one line; one that opens a bracket goes on to the line that closes it."""
    match = re.search(rf"^  {name} += (.*)$", body, re.MULTILINE)
    if match is None:
        return None
    if not match[1].endswith(("{", "[", "(")):
        return match[1]
    lines = [match[1]]
    for line in body[match.end() + 1 :].splitlines():
        lines.append(line)
        if re.match(r"  [)\]}]", line):
            break
    return _in_one_line([re.sub(r" {2,}", " ", line.strip()) for line in lines])


def _in_one_line(lines: list[str]) -> str:
    """HCL parts the members of a block by line ends; in one line they need commas."""
    text = lines[0]
    for before, line in pairwise(lines):
        opened, closes = before.endswith(("{", "[", "(")), line.startswith((")", "]", "}"))
        text += (" " if opened or closes else ", ") + line
    return text


def inputs_table(text: str) -> str:
    rows = [
        f"| `{each.name}` | {_cell(each.description)} | `{each.type}` | {_default(each)} |"
        for each in blocks(text, "variable")
    ]
    return "\n".join(["| Name | Description | Type | Default |", "|---|---|---|---|", *rows])


def outputs_table(text: str) -> str:
    rows = [f"| `{each.name}` | {_cell(each.description)} |" for each in blocks(text, "output")]
    return "\n".join(["| Name | Description |", "|---|---|", *rows])


def _default(block: Block) -> str:
    return "required" if block.default is None else f"`{block.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def with_tables(readme: str, module: Path = MODULE) -> str:
    """The README with its two tables replaced. Raises ValueError where a marker is missing."""
    tables = {
        "inputs": inputs_table((module / "variables.tf").read_text(encoding="utf-8")),
        "outputs": outputs_table((module / "outputs.tf").read_text(encoding="utf-8")),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name}: make tf-docs -->", f"<!-- end of {name} -->"
        before, begun, rest = readme.partition(begin)
        _, ended, after = rest.partition(end)
        if not begun or not ended:
            raise ValueError(f"README.md has no markers {begin} ... {end}")
        readme = f"{before}{begin}\n{table}\n{end}{after}"
    return readme


def main() -> int:
    path = MODULE / "README.md"
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
