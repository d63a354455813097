"""`python -m benchmarks.gpu OUT.json [part …]`: copies, calls, shape_8b, conversation; all of them without a name."""

from __future__ import annotations

import importlib
import json
import random
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

PARTS = ("copies", "calls", "shape_8b", "conversation")


def main(out: Path, parts: list[str]) -> None:
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
    }
    for part in parts or PARTS:
        print(f"== {part}", flush=True)
        result[part] = importlib.import_module(f"benchmarks.gpu.{part}").run(random.Random(0))
        out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
