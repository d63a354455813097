"""Writes `docs/cli.md` by running every command: `python docs/make_cli.py`, or `--check` to compare.

Everything is real: a folder store, an agent, a simulated engine behind an OpenAI-compatible server. Paths, times,
numbers and hashes differ from run to run, so the comparison replaces them; what was measured it leaves out.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.command import Cli  # noqa: E402

DOCUMENT = ROOT / "docs" / "cli.md"
WIDTH = "110"
SHOWN_FOLDER = "/home/you/s3kv-session1"  # as long as what it stands for, so that tables keep their widths
MEASURED, END = "<!-- measured: differs from run to run -->", "<!-- /measured -->"

HEAD = """# The commands

Every command has `--help`, `--json`, and the common options (`--config`, `--store`, `--region`, `--endpoint`,
`--profile`, `--set section.name=value`), before or after its name. Exit codes: 0 done, 1 a finding or a failure, 2
wrong use, 130 interrupted. Failures are one line on standard error that names the setting to change. Progress bars
appear after a second, on a terminal only. With `--json`, commands that repeat (`top --count`, `gc --every`) write one
document a line, each as soon as it is known. `s3kv --install-completion` sets up completion for your shell.

This page is written by `python docs/make_cli.py`, which runs the commands; CI checks that it is current. The settings
file of the session below, named in `S3KV_CONFIG`, is:

```yaml
{config}
```
"""

CONFIG = """store:
  url: file://{folder}/bucket
agent:
  socket: {folder}/agent.sock
tier:
  capacity_bytes: 32MiB
upload:
  seal_age_s: 60
  seal_grace_s: 0.05
collect:
  grace_s: 0
"""

SYSTEM = "You are a patient assistant of a public library. Answer briefly and name your source. " * 2
QUESTIONS = ("Who wrote Middlemarch?", "When does the reading room open on Sundays?", "Where is the atlas of 1898?")


@dataclass(frozen=True)
class Step:
    """A command line. `head`: only so many lines are shown; `code` is what it must exit with."""

    line: str
    code: int = 0
    head: int | None = None
    measured: bool = False


@dataclass
class Scene:
    title: str
    text: str
    steps: list[Step] = field(default_factory=list)


SETTINGS = [
    Scene("All commands", "", [Step("s3kv --help")]),
    Scene(
        "s3kv config",
        "The settings in force and where each came from; a file to start from; what looks wrong.",
        [
            Step("s3kv config template", head=14),
            Step("s3kv config show", head=12),
            Step("s3kv config show --connector"),
            Step("s3kv config check"),
            Step("s3kv config check --set store.tls_verify=false", code=1),
        ],
    ),
    Scene(
        "s3kv fingerprint",
        "The identity of a checkpoint's weights, as the connector computes it.",
        [Step("s3kv fingerprint {folder}/model")],
    ),
    Scene(
        "s3kv bucket create, check",
        "On S3 these set and compare encryption, public access block, policy, lifecycle and tags, as the Terraform"
        " module does; a folder needs less.",
        [
            Step("s3kv bucket check", code=1),
            Step("s3kv bucket create"),
            Step("s3kv bucket check"),
        ],
    ),
    Scene(
        "s3kv doctor",
        "Tries each call that s3kv makes under a scratch key, and looks at this machine.",
        [Step("s3kv doctor", measured=True)],
    ),
    Scene(
        "s3kv bench store",
        "What the bucket gives, and from which prompt length loading beats computing.",
        [Step("s3kv bench store --objects 8 --size 4MiB --prefill 1000", measured=True)],
    ),
]

SERVING = [
    Scene(
        "s3kv warm",
        "How much of each prompt is held; computed through a server; brought into host memory. What the bucket holds is"
        " not computed again.",
        [
            Step("s3kv warm {folder}/prompts.txt --tokenizer bytes"),
            Step("s3kv warm {folder}/prompts.txt --tokenizer bytes --concurrency 1 --through {url}"),
            Step("s3kv warm {folder}/prompts.txt --tokenizer bytes --concurrency 1 --through {url}"),
            Step("s3kv agent forget"),
            Step("s3kv warm {folder}/prompts.txt --tokenizer bytes --prefetch"),
            Step("s3kv warm {folder}/mixed.jsonl --tokenizer bytes", code=1),
        ],
    ),
    Scene(
        "s3kv agent status, drain",
        "",
        [Step("s3kv agent status"), Step("s3kv agent drain")],
    ),
    Scene(
        "s3kv top",
        "A live view on a terminal (see [terminal.md](terminal.md)); one look after another in a pipe.",
        [Step("s3kv top --interval 1s", measured=True)],
    ),
]

LOOKING = [
    Scene(
        "s3kv bucket list, s3kv usage",
        "",
        [Step("s3kv bucket list"), Step("s3kv usage"), Step("s3kv bucket usage --json", head=12)],
    ),
    Scene(
        "s3kv ls, inspect",
        "",
        [
            Step("s3kv ls"),
            Step("s3kv ls ns/{namespace}"),
            Step("s3kv inspect {chunk}", head=34),
            Step("s3kv inspect ns/{namespace}/namespace.json", head=10),
        ],
    ),
    Scene(
        "s3kv verify",
        "Reads chunks back and checks every byte. The second run finds a byte that was changed, the third forgets it.",
        [
            Step("s3kv verify"),
            Step("damage {chunk}"),
            Step("s3kv verify", code=1),
            Step("s3kv verify --repair", code=1),
            Step("s3kv verify"),
        ],
    ),
    Scene(
        "s3kv gc",
        "Plans, shows the plan, asks (not here: `--yes`), forgets, waits the grace period, checks again, deletes.",
        [
            Step("s3kv gc", code=2),
            Step("s3kv gc --max-bytes 20KiB --max-idle 30d --dry-run"),
            Step("s3kv gc --max-bytes 20KiB", code=1),
            Step("s3kv gc --max-bytes 20KiB --yes"),
            Step("s3kv gc --orphans --superseded --compact --yes"),
        ],
    ),
    Scene("s3kv catalog rebuild, compact", "", [Step("s3kv catalog rebuild"), Step("s3kv catalog compact")]),
    Scene(
        "s3kv bucket delete",
        "",
        [
            Step("s3kv bucket delete --everything --dry-run"),
            Step("s3kv bucket delete --everything", code=1),
            Step("s3kv bucket delete --everything --yes"),
        ],
    ),
    Scene(
        "Errors",
        "",
        [
            Step("s3kv agent status", code=1),
            Step("s3kv usage --store s3://my-kv/prod --endpoint http://127.0.0.1:9 --set store.retries=0", code=1),
            Step("s3kv bucket check --store s3://kv", code=1),
            Step("s3kv usage --set store.client=curl", code=1),
            Step("s3kv usage --namespace llama", code=1),
            Step("s3kv gc --max-bytes lots", code=2),
        ],
    ),
]


class Session:
    """A folder that everything happens in, and what the steps' placeholders mean."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words = {"folder": str(folder)}

    def prepare(self) -> None:
        (self.folder / "s3kv.yaml").write_text(CONFIG.format(folder=self.folder))
        model = self.folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(bytes(range(256)) * 64)
        (self.folder / "prompts.txt").write_text("".join(f"{SYSTEM}{question}\n" for question in QUESTIONS))
        mixed = ['{"prompt": "%s"}' % SYSTEM.strip(), '{"promt": "a typo"}', '{"prompt": "x", "lora": 9}']  # noqa: UP031
        (self.folder / "mixed.jsonl").write_text("\n".join(mixed) + "\n")

    def run(self, step: Step) -> str:
        """The step as a reader sees it. Raises AssertionError when it did not end as it should."""
        line = step.line.format(**self.words)
        words = shlex.split(line)
        if words[0] == "damage":
            return self._damage(words[1])
        ran = Cli()(*words[1:])
        assert ran.code == step.code, f"{line}: exit code {ran.code}\n{ran.out}\n{ran.err}"
        output = [text.rstrip() for text in (ran.out + ran.err).strip("\n").splitlines()]
        shown = f"$ {line}" if step.head is None else f"$ {line} | head -{step.head}"
        code = [f"(exit code {step.code})"] if step.code else []
        return "\n".join([shown, *output[: step.head], *code])

    def _damage(self, chunk: str) -> str:
        (path,) = self.folder.glob(f"bucket/ns/*/chunk/{chunk[:2]}/{chunk}/g0")
        body = bytearray(path.read_bytes())
        body[-1] ^= 1
        path.write_bytes(body)
        return f"# (one byte of chunk {chunk[:8]}… is changed)"

    def look(self) -> None:
        """Names for what is in the bucket now."""
        chunks = sorted(self.folder.glob("bucket/ns/*/chunk/*/*"))
        largest = max(chunks, key=lambda path: ((path / "g0").stat().st_size, path.name))
        self.words["namespace"] = largest.parents[2].name
        self.words["chunk"] = largest.name


@contextmanager
def background(session: Session, line: str, marker: str) -> Iterator[str]:
    """A command that goes on; yields its transcript up to the line with `marker`. Ended by SIGTERM."""
    command = [sys.executable, "-m", "s3kv_cli.main", *shlex.split(line)[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        seen: list[str] = []
        for text in process.stdout:
            seen.append(text.rstrip())
            if marker in text:
                break
        else:
            raise AssertionError(f"{line} ended: {seen}")
        session.words["url"] = seen[-1].split()[-1]
        yield "\n".join([f"$ {line} &", *seen])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        process.stdout.read()
        process.stdout.close()
        process.wait(60)


def block(text: str, *, measured: bool = False) -> str:
    fenced = f"```console\n{text}\n```"
    return f"{MEASURED}\n{fenced}\n{END}" if measured else fenced


def render(scene: Scene, session: Session) -> str:
    parts = [f"## {scene.title}" if scene.title.startswith("All") or " " not in scene.title else f"## `{scene.title}`"]
    parts += [textwrap.fill(scene.text, 118, break_long_words=False, break_on_hyphens=False)] if scene.text else []
    parts += [block(session.run(step), measured=step.measured) for step in scene.steps]
    return "\n\n".join(parts)


def generate() -> str:
    """The document. Takes some 20 s."""
    with tempfile.TemporaryDirectory(prefix="s3kv-docs-", dir="/tmp") as name:
        session = Session(Path(name))
        session.prepare()
        settings = {each: None for each in os.environ if each.startswith(("S3KV_", "AWS_"))}
        keys = {"AWS_ACCESS_KEY_ID": "example", "AWS_SECRET_ACCESS_KEY": "example"}
        shown = {"S3KV_CONFIG": f"{name}/s3kv.yaml", "COLUMNS": WIDTH, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        with environment({**settings, **keys, **shown}):
            parts = [HEAD.format(config=CONFIG.format(folder=name).strip())]
            parts += [render(scene, session) for scene in SETTINGS]
            parts += _serving(session)
            session.look()
            parts += [render(scene, session) for scene in LOOKING]
        text = "\n\n".join(part.strip("\n") for part in parts) + "\n"
    return text.replace(name, SHOWN_FOLDER)


def _serving(session: Session) -> list[str]:
    run = "s3kv agent run"
    serve = "s3kv sim serve --port 0 --block-tokens 16"
    with background(session, run, "serving") as agent, background(session, serve, " at http://") as server:
        parts = [
            "## `s3kv agent run`, `s3kv sim serve`\n\nThe agent is a service of its own in production; an engine's "
            "leader starts one where none listens.\nThe simulated engine stands in for trtllm-serve.",
            block(agent, measured=True),
            block(server, measured=True),
        ]
        parts += [render(scene, session) for scene in SERVING]
        parts.append("## `s3kv agent stop`\n\n" + block(session.run(Step("s3kv agent stop"))))
    return parts


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Variables for a while; None takes one away."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in values.items() if value is not None})
    for name in [name for name, value in values.items() if value is None]:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def comparable(document: str) -> list[str]:
    """The document's lines without what may differ from run to run."""
    kept = re.sub(f"{re.escape(MEASURED)}.*?{re.escape(END)}", MEASURED, document, flags=re.DOTALL)
    kept = re.sub(r"\b[0-9a-f]{8,}\b", "H", kept)
    kept = re.sub(r"█+", "█", re.sub(r"\d[\d.,:]*", "N", kept))
    kept = re.sub(r"N (B|KiB|MiB|ms|s|min|h)\b", "N", kept)
    return [re.sub(r"\s{2,}|─+|━+", " ", line).strip() for line in kept.splitlines()]


def main(arguments: list[str]) -> int:
    fresh = generate()
    current = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    difference = list(difflib.unified_diff(comparable(current), comparable(fresh), "docs/cli.md", "now", lineterm=""))
    if arguments == ["--check"]:
        print("\n".join(difference) or "docs/cli.md is current")
        return 1 if difference else 0
    DOCUMENT.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
