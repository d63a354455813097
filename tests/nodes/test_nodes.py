"""Nodes that share nothing but a bucket: one computes and is destroyed, the others serve what it computed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.agents import agent_settings
from support.servers import S3Place

from s3kv.client.connection import Connection
from s3kv.client.launch import connect_or_start
from s3kv.client.protocol import Drain, Drained, Report, Status
from s3kv.settings import CONFIG_VARIABLE, Settings
from s3kv.sim.demo import CONNECTOR, read_prompts, write_settings

PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
S3KV = Path(sys.executable).with_name("s3kv")
COUNT, LENGTH, BLOCK = 4, 500, 32


class Node:
    """A folder, an agent with a tier of its own, and engines that end with their job."""

    def __init__(self, folder: Path, place: S3Place) -> None:
        folder.mkdir()
        self.folder = folder
        self.settings: Settings = agent_settings(
            folder,
            store=place.values(),
            identity={"fingerprint": "nodes"},
            tier={"capacity_bytes": 1 << 26},
        )
        self.environment = {**os.environ, CONFIG_VARIABLE: str(folder / "s3kv.yaml")}
        write_settings(self.settings, folder / "s3kv.yaml")

    @contextlib.contextmanager
    def agent(self, monkeypatch: Any) -> Iterator[Connection]:
        """Ends by SIGKILL: nothing of the node survives."""
        monkeypatch.setenv(CONFIG_VARIABLE, self.environment[CONFIG_VARIABLE])
        connection = connect_or_start(self.settings.agent, "cli", start=True, timeout_s=30)
        pid = self.status(connection)["pid"]
        try:
            yield connection
        finally:
            os.kill(pid, signal.SIGKILL)
            connection.close()

    def status(self, connection: Connection) -> dict[str, Any]:
        reply = connection.call(Status(connection.next_id()), Report, timeout_s=30)
        status: dict[str, Any] = json.loads(reply.text)
        return status

    def generate(self, connector: dict[str, str] | None) -> list[dict[str, Any]]:
        job = {
            "config": {"tokens_per_block": BLOCK, "num_pages": 64, "kv_dtype": "bfloat16"},
            "connector": connector,
            "requests": [
                {"request_id": index, "prompt_tokens": prompt.tokens[:LENGTH], "max_new_tokens": 8}
                for index, prompt in enumerate(read_prompts(PROMPTS)[: 4 * COUNT : 4])
            ],
            "sequential": True,
            "empty_device": True,
        }
        (self.folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-m", "s3kv.sim.engine", self.folder / "job.json", self.folder / "result.json"]
        subprocess.run(command, env=self.environment, check=True, timeout=300)
        results: list[dict[str, Any]] = json.loads((self.folder / "result.json").read_text())["results"]
        return results

    def cli(self, *arguments: str) -> Any:
        done = subprocess.run(
            [S3KV, *arguments, "--json"], env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def served_from_bucket(node: Node, monkeypatch: Any, wanted: list[Any]) -> None:
    with node.agent(monkeypatch) as connection:
        results = node.generate(CONNECTOR)
        assert [each["tokens"] for each in results] == wanted
        loadable = (LENGTH - 1) // BLOCK * BLOCK
        assert [each["loaded_tokens"] for each in results] == [loadable] * COUNT
        totals = node.status(connection)["totals"]
        assert totals["fetched_blocks"] > 0
        assert totals["uploaded_chunks"] == 0 or totals["known_blocks"] > 0


def test_what_one_node_computed_others_serve_also_after_the_catalog_was_lost(
    tmp_path: Path, seaweedfs_place: S3Place, monkeypatch: Any
) -> None:
    a, b, c = (Node(tmp_path / name, seaweedfs_place) for name in "abc")
    wanted = [each["tokens"] for each in a.generate(None)]
    with a.agent(monkeypatch) as connection:
        assert [each["tokens"] for each in a.generate(CONNECTOR)] == wanted
        drained = connection.call(Drain(connection.next_id(), 60.0), Drained, timeout_s=70)
        assert drained.unsaved_blocks == 0
        namespace = a.status(connection)["namespaces"][0]["namespace"]
    served_from_bucket(b, monkeypatch, wanted)

    client = seaweedfs_place.client()
    lost = 0
    for part in ("log", "snap"):
        prefix = f"{seaweedfs_place.prefix}/ns/{namespace}/{part}/"
        for entry in client.list_objects_v2(Bucket=seaweedfs_place.bucket, Prefix=prefix).get("Contents", []):
            client.delete_object(Bucket=seaweedfs_place.bucket, Key=entry["Key"])
            lost += 1
    assert lost > 0
    c.cli("catalog", "rebuild")
    served_from_bucket(c, monkeypatch, wanted)
