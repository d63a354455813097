"""Ctrl-C and SIGTERM end a command that waits for a person, a pipe or an agent: at once, with 130, without a traceback.

Each signal is sent when the command is seen to wait. The limits of time are for a command that does not end.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.places import SPEC, Filled, Place
from support.silent_agent import welcome

from s3kv.client import protocol as p

LIMIT_S = 60.0
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


def command(place: Place, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "s3kv_cli.main", *place.cli.common, *arguments]


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextmanager
def asking(place: Place, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command at a terminal, once it has asked; and the terminal's other side."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command(place, *arguments), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    with ended(process):
        seen = b""
        while not seen.endswith(b"[y/N]: "):
            seen += os.read(ours, 65536)
        yield process, ours
    os.close(ours)


def rest(terminal: int) -> str:
    """What is said until the command ends, which closes the terminal."""
    seen = b""
    try:
        while piece := os.read(terminal, 65536):
            seen += piece
    except OSError:
        pass
    return seen.decode().replace("\r\n", "\n")


GC = ("gc", "--max-bytes", "1", "--grace", "0s")
QUESTIONS = pytest.mark.parametrize("arguments", [GC, ("bucket", "delete", "--everything")], ids=" ".join)


@SIGNALS
@QUESTIONS
def test_a_question_can_be_interrupted(filled: Filled, arguments: tuple[str, ...], number: int) -> None:
    before = filled.place.keys()
    with asking(filled.place, *arguments) as (process, terminal):
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 130
        assert rest(terminal) == "\ns3kv: interrupted\n"
    assert filled.place.keys() == before


@pytest.mark.parametrize(
    ("typed", "code"), [("n\n", 1), ("\n", 1), ("\x04", 1), ("what\nno\n", 1), ("y\n", 0), ("Yes\n", 0)]
)
def test_a_question_is_answered(filled: Filled, typed: str, code: int) -> None:
    with asking(filled.place, *GC) as (process, terminal):
        os.write(terminal, typed.encode())
        assert process.wait(LIMIT_S) == code
        said = rest(terminal)
        assert ("nothing was changed" in said) is (code == 1)
        assert ("answer y or n" in said) is typed.startswith("what")


@SIGNALS
def test_prompts_from_a_pipe_that_stays_open(filled: Filled, number: int) -> None:
    arguments = command(filled.place, "warm", "-", "--tokenizer", "bytes")
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with ended(process):
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"x" * (1 << 20))  # more than a pipe holds, and no end of a line: it reads, and waits
        process.stdin.flush()
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 130
        assert process.stderr.read() == b"s3kv: interrupted\n"


@SIGNALS
def test_an_agent_that_does_not_answer(filled: Filled, tmp_path: Path, number: int) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": filled.tokens}))
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(LIMIT_S)
        arguments = command(filled.place, "warm", str(prompts), "--prefetch", "--set", f"agent.socket={path}")
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with ended(process), listening.accept()[0] as peer:
            peer.settimeout(LIMIT_S)
            assert isinstance(request(peer), p.Hello)
            peer.sendall(welcome())
            asked = request(peer)
            assert isinstance(asked, p.Prefetch) and asked.namespace == SPEC.name
            process.send_signal(number)
            assert process.wait(LIMIT_S) == 130  # the answer is waited for much longer
            assert process.stderr is not None and process.stderr.read() == b"s3kv: interrupted\n"


def request(peer: socket.socket) -> p.Message:
    head = peer.recv(p.LENGTH.size, socket.MSG_WAITALL)
    return p.decode_request(peer.recv(p.frame_length(bytearray(head)), socket.MSG_WAITALL))
