"""What can be said of the module without applying it: its README, its examples, its wrapper."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MODULE = Path(__file__).parents[2] / "terraform"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_tables", MODULE / "scripts/readme_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_has_every_input_and_output_as_it_is(tables: ModuleType) -> None:
    readme = (MODULE / "README.md").read_text()
    assert tables.with_tables(readme) == readme, "run make tf-docs"


@pytest.mark.parametrize(("kind", "file"), [("variable", "variables.tf"), ("output", "outputs.tf")])
def test_the_tables_miss_no_block(tables: ModuleType, kind: str, file: str) -> None:
    text = (MODULE / file).read_text()
    names = re.findall(rf'^{kind} "(\w+)"', text, re.MULTILINE)
    assert [each.name for each in tables.blocks(text, kind)] == names
    readme = (MODULE / "README.md").read_text()
    assert all(f"\n| `{name}` | " in readme for name in names)


def test_every_variable_has_a_type(tables: ModuleType) -> None:
    assert all(each.type for each in tables.blocks((MODULE / "variables.tf").read_text(), "variable"))


def test_the_module_configures_no_provider() -> None:
    for file in MODULE.glob("*.tf"):
        assert not re.search(r"^provider ", file.read_text(), re.MULTILINE), file.name


def test_every_skipped_check_has_its_reason() -> None:
    for file in MODULE.rglob("*.tf"):
        for skip in re.findall(r"#checkov:skip=(.*)", file.read_text()):
            assert re.fullmatch(r"CKV2?_AWS_\d+:.{20,}", skip), f"{file.name}: {skip}"


@pytest.mark.terraform
@pytest.mark.parametrize("example", ["basic", "complete"])
def test_the_examples_can_be_planned(terraform_at: Callable[..., Any], example: str) -> None:
    folder = MODULE / "examples" / example
    terraform = terraform_at(
        "\n".join(path.read_text() for path in sorted(folder.glob("*.tf"))).replace("../..", str(MODULE))
    )
    values = {
        "bucket_name": "example-kv-cache",
        "cluster_name": "gpu",
        "oidc_provider_arn": "arn:aws:iam::123456789012:oidc-provider/oidc.eks.us-east-1.amazonaws.com/id/ABC",
        "vpc_id": "vpc-1",
        "route_table_ids": '["rtb-1"]',
        "alarm_topic_arn": "arn:aws:sns:us-east-1:123456789012:ops",
    }
    declared = (terraform.root / "main.tf").read_text()
    given = [f"-var={name}={value}" for name, value in values.items() if f'variable "{name}"' in declared]

    plan = terraform("plan", "-input=false", "-no-color", *given).stdout

    assert "s3://example-kv-cache/" in plan
    assert ("aws_s3_directory_bucket" in plan) == (example == "complete")
    assert "Warning" not in plan


class TestWrapper:
    """scripts/tf with a program in terraform's place that says how it was called."""

    @pytest.fixture
    def call(self, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
        fake = tmp_path / "bin/terraform"
        fake.parent.mkdir()
        fake.write_text('#!/bin/sh\necho "config=$TF_CLI_CONFIG_FILE args=$*"\n')
        fake.chmod(0o755)

        def call(**variables: str) -> subprocess.CompletedProcess[str]:
            path = f"{fake.parent}:{os.environ['PATH']}"
            environment = {"PATH": path, "HOME": str(tmp_path), "S3KV_TF_CACHE": str(tmp_path / "cache"), **variables}
            return subprocess.run(
                [str(MODULE / "scripts/tf"), "plan"], env=environment, capture_output=True, text=True, timeout=60
            )

        return call

    def test_a_named_mirror_is_used_for_the_one_provider_alone(
        self, call: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
    ) -> None:
        (tmp_path / "mirror/registry.terraform.io/hashicorp/aws").mkdir(parents=True)

        done = call(S3KV_TF_MIRROR=str(tmp_path / "mirror"), TF_CLI_CONFIG_FILE="/does/not/exist")

        config = tmp_path / "cache/cli.tfrc"
        assert done.stdout == f"config={config} args=plan\n"
        assert f'path    = "{tmp_path}/mirror"' in config.read_text()
        assert 'exclude = ["registry.terraform.io/hashicorp/aws"]' in config.read_text()

    def test_a_mirror_in_a_usual_place_is_found(
        self, call: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
    ) -> None:
        (tmp_path / ".terraform.d/plugins/registry.terraform.io/hashicorp/aws").mkdir(parents=True)

        assert call().stdout == f"config={tmp_path}/cache/cli.tfrc args=plan\n"
        assert f'path    = "{tmp_path}/.terraform.d/plugins"' in (tmp_path / "cache/cli.tfrc").read_text()

    def test_a_named_mirror_that_is_none_is_refused(
        self, call: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
    ) -> None:
        done = call(S3KV_TF_MIRROR=str(tmp_path))
        assert done.returncode != 0
        assert f"S3KV_TF_MIRROR={tmp_path} does not contain" in done.stderr
