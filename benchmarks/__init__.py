"""Speed against named limits: `python -m benchmarks`, or `python -m benchmarks NAME…`; see README.md in this folder.

Servers, agents and catalogs come from the tests' support package, so that no second copy of them exists.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

if str(ROOT / "tests") not in sys.path:
    sys.path.append(str(ROOT / "tests"))
