"""Running the CLI in this process, as a shell would see it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from s3kv_cli.main import main

from support.servers import S3Place


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def ok(self) -> Ran:
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        return self


class Cli:
    """Commands on one store; arguments that every command gets."""

    def __init__(self, *common: str) -> None:
        self.common = common

    @classmethod
    def on(cls, place: S3Place) -> Cli:
        sets = {
            "url": f"s3://{place.bucket}/{place.prefix}",
            "endpoint": place.endpoint,
            "region": place.region,
            "access_key_id": place.access_key,
            "secret_access_key": place.secret_key,
        }
        return cls(*(word for name, value in sets.items() for word in ("--set", f"store.{name}={value}")))

    def __call__(self, *arguments: str) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main([*self.common, *arguments])
        return Ran(code, out.getvalue(), err.getvalue())
