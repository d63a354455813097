"""Runs terraform through the module's own wrapper, which finds the provider with and without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.servers import ACCESS_KEY, REGION, SECRET_KEY

MODULE = Path(__file__).parents[2] / "terraform"

# Taken before the fixtures clean the environment: the provider may have to come through a proxy or from a mirror.
_OUTSIDE = {
    name: value for name, value in os.environ.items() if name.startswith("S3KV_TF_") or name.lower().endswith("_proxy")
}


def _terraform_is_missing() -> str | None:
    if shutil.which("terraform") is None:
        return "terraform is not on the PATH"
    return None


@dataclass
class Terraform:
    """terraform in one root folder, with the AWS provider pointed at a moto server."""

    root: Path
    environment: dict[str, str] = field(repr=False)

    def __call__(self, *arguments: str, accept: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(MODULE / "scripts/tf"), f"-chdir={self.root}", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode in accept, f"terraform {arguments[0]}:\n{done.stdout}\n{done.stderr}"
        return done

    def outputs(self) -> dict[str, Any]:
        return {name: each["value"] for name, each in json.loads(self("output", "-json").stdout).items()}


@pytest.fixture
def terraform_at(moto_server: str, tmp_path: Path) -> Callable[[str], Terraform]:
    """Makes a root folder of the given configuration, initialised. Skips where there is no terraform."""
    if reason := _terraform_is_missing():
        pytest.skip(reason)

    def prepare(configuration: str) -> Terraform:
        root = tmp_path / "root"
        root.mkdir()
        (root / "main.tf").write_text(configuration)
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        environment |= _OUTSIDE | {
            "AWS_ENDPOINT_URL": moto_server,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "TF_DATA_DIR": str(tmp_path / "data"),
            "S3KV_TF_CACHE": str(tmp_path / "cache"),
        }
        terraform = Terraform(root, environment)
        terraform("init", "-input=false", "-no-color")
        return terraform

    return prepare
