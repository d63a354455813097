"""`python -m s3kv.agent`: the agent as an engine's leader or a service manager starts it."""

from __future__ import annotations

import sys

from s3kv.agent.service import run
from s3kv.errors import ConfigError
from s3kv.settings import load_settings


def main() -> int:
    try:
        return run(load_settings())
    except ConfigError as error:
        print(f"s3kv: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
