"""Writes `docs/terminal.md`: what a person sees of `warm`, `top` and `gc`, recorded from a real terminal (tmux).

`python docs/record_terminal.py`; needs tmux. What is shown are the very screens that tmux held at that moment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "terminal.md"
BIN = Path(sys.executable).parent
WIDTH, HEIGHT = 108, 36
PATIENCE_S = 120.0

HEAD = """# The commands on a terminal

Screens of one session, as tmux held them: progress bars appear after a second and go when the work is done, `top`
takes the whole screen, `gc` asks. Recorded by `python docs/record_terminal.py`; [cli.md](cli.md) explains the commands.
"""

SYSTEM = "You are a patient assistant of a public library. Answer briefly, and name the sources of your answer. " * 12


class Terminal:
    """A tmux server of its own with one window."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "tmux.sock")
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "S3KV_CONFIG": f"{folder}/s3kv.yaml", "OMP_NUM_THREADS": "1", "PS1": "$ "}
        words = [f"{name}={value}" for name, value in environment.items()]
        size = ("-x", str(WIDTH), "-y", str(HEIGHT))
        shell = ["env", *words, "bash", "--norc", "--noprofile"]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(folder), *shell)

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-S", self._socket, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def type(self, text: str, *, enter: bool = True) -> None:
        self._tmux("send-keys", "-l", text)
        if enter:
            self._tmux("send-keys", "Enter")

    def interrupt(self) -> None:
        self._tmux("send-keys", "C-c")

    def clear(self) -> None:
        self._tmux("send-keys", "C-l")
        self._tmux("clear-history")

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p").rstrip("\n")

    def wait(self, what: str | Callable[[str], bool]) -> str:
        """The screen once it shows `what` (a pattern). Raises AssertionError after PATIENCE_S."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            screen = self.screen()
            if re.search(what, screen, re.MULTILINE) if isinstance(what, str) else what(screen):
                return screen
            time.sleep(0.05)  # noqa: TID251 - a real terminal's time
        raise AssertionError(f"the terminal never showed {what}:\n{self.screen()}")

    def close(self) -> None:
        self._tmux("kill-server")


def record(folder: Path) -> list[tuple[str, str]]:
    """(what is seen, the screen) of each moment."""
    (folder / "s3kv.yaml").write_text(
        f"store: {{url: 'file://{folder}/bucket'}}\n"
        f"agent: {{socket: {folder}/agent.sock}}\n"
        "tier: {capacity_bytes: 67108864}\n"
        "upload: {seal_grace_s: 0.05}\n"
        "collect: {grace_s: 4}\n"
    )
    (folder / "prompts.txt").write_text("".join(f"{SYSTEM}Question {n}: {'why? ' * n}\n" for n in range(40)))
    environment = {**os.environ, "S3KV_CONFIG": str(folder / "s3kv.yaml"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "s3kv_cli.main", "sim", "serve", "--port", "0", "--block-tokens", "16"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    terminal = None
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        terminal = Terminal(folder)
        (folder / "watch").mkdir()
        return [*_warm(terminal, url, folder), *_gc(terminal)]
    finally:
        if terminal is not None:
            terminal.close()
        server.terminate()
        server.wait(60)
        subprocess.run([BIN / "s3kv", "agent", "stop"], env=environment, check=False, capture_output=True)


def _warm(terminal: Terminal, url: str, folder: Path) -> list[tuple[str, str]]:
    other = Terminal(_beside(folder))
    try:
        other.wait(r"^\$")
        other.type("s3kv top --interval 1s")
        terminal.wait(r"^\$")
        terminal.type(f"s3kv warm prompts.txt --tokenizer bytes --through {url} | tail -24")
        working = terminal.wait(r"compute .*\s[1-9]\d*/\d+")
        top = other.wait(lambda screen: "put" in screen and not re.search(r"to the bucket\s+0 B/s", screen))
        done = terminal.wait(r"tokens are in the bucket")
        other.interrupt()
        return [
            ("`s3kv warm --through`, at work", working),
            ("`s3kv top` in another terminal meanwhile", top),
            ("`s3kv warm`, done", done),
        ]
    finally:
        other.close()


def _beside(folder: Path) -> Path:
    """A folder with the same settings for the second terminal's tmux server."""
    beside = folder / "watch"
    (beside / "s3kv.yaml").write_text((folder / "s3kv.yaml").read_text())
    return beside


def _gc(terminal: Terminal) -> list[tuple[str, str]]:
    terminal.clear()
    terminal.type("s3kv gc --max-bytes 900KiB --max-idle 30d")
    asked = terminal.wait(r"Go ahead\?")
    terminal.type("y")
    waiting = terminal.wait(r"grace period .*\s[1-9]\d*/\d+")
    done = terminal.wait(r"^Deleted ")
    return [("`s3kv gc` shows its plan and asks", asked), ("the grace period", waiting), ("done", done)]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="s3kv-tty-", dir="/tmp") as name:
        moments = record(Path(name))
    parts = [HEAD] + [f"## {title}\n\n```text\n{_tidy(screen, name)}\n```\n" for title, screen in moments]
    DOCUMENT.write_text("\n".join(parts), encoding="utf-8")
    return 0


def _tidy(screen: str, folder: str) -> str:
    lines = [line.rstrip() for line in screen.replace(folder, "/home/you/s3kv-demo").splitlines()]
    while lines and lines[-1] in ("", "$"):
        lines.pop()
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
