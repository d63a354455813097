"""Sockets that another user put where this user's agent would be."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from support.agents import RunningAgent, agent_settings, running_agent

from s3kv.client.connection import AgentRefused, Connection
from s3kv.client.launch import connect_or_start, start_agent
from s3kv.client.trust import Peer, foreign_folder, may_serve, open_to_all
from s3kv.errors import AgentUnavailable, ConfigError

STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder for a socket that a stranger made in a folder like /tmp."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    folder = shared / "s3kv-0"
    folder.mkdir(mode=0o777)
    os.chown(folder, STRANGER, STRANGER)
    return folder


@needs_root
def test_an_agent_of_another_user_is_told_nothing(trap: Path) -> None:
    settings = agent_settings(trap, agent={"autostart": True})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(settings.agent.socket))
        os.seteuid(STRANGER)
        try:
            listener.listen()  # the kernel notes who does this
        finally:
            os.seteuid(0)
        with pytest.raises(AgentRefused, match=f"run by user {STRANGER}"):
            connect_or_start(settings.agent, "worker", start=True, timeout_s=5)
        heard, _ = listener.accept()
        with heard:
            assert heard.recv(1) == b""
        trusting = settings.agent.model_copy(update={"trusted_uid": STRANGER})
        with pytest.raises(AgentUnavailable) as caught:  # nobody answers here
            connect_or_start(trusting, "worker", start=False, timeout_s=0.01)
        assert not isinstance(caught.value, AgentRefused)
    assert [each.name for each in trap.iterdir()] == ["agent.sock"], "no agent was started there either"


@pytest.mark.parametrize(
    ("uid", "own", "everybodys", "allowed"),
    [
        (1000, 1000, True, True),
        (0, 1000, True, True),
        (1001, 1000, False, False),
        (1001, 0, True, False),
        (1001, 0, False, True),
    ],
)
def test_whose_agent_may_be_used(tmp_path: Path, uid: int, own: int, everybodys: bool, allowed: bool) -> None:
    """Root uses a service's agent where no other user could have put one."""
    tmp_path.chmod(0o1777)
    folder = tmp_path if everybodys else Path("/usr/lib")
    assert may_serve(Peer(1, uid), own, folder / "agent.sock") is allowed


def test_a_folder_is_open_to_all_by_way_of_any_folder_above_it_and_behind_any_link(tmp_path: Path) -> None:
    (tmp_path / "open" / "closed").mkdir(parents=True)
    (tmp_path / "open").chmod(0o1777)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "closed")
    assert open_to_all(tmp_path / "open" / "closed") and open_to_all(tmp_path / "link")
    assert not open_to_all(Path("/usr/lib"))


@needs_root
def test_no_agent_serves_or_is_started_in_a_folder_of_another_user(trap: Path) -> None:
    for folder in (trap, trap / "below"):
        settings = agent_settings(folder)
        with pytest.raises(ConfigError, match=r"agent\.socket: folder .*s3kv-0 belongs to another user"):
            RunningAgent(settings)
        with pytest.raises(AgentUnavailable, match="belongs to another user"):
            start_agent(settings.agent)
    assert [each.name for each in trap.rglob("*")] == ["below"], "neither lock, nor socket, nor log"


@needs_root
def test_a_link_is_its_owners_trap_whatever_it_points_to(trap: Path) -> None:
    link = trap.parent / "link"
    link.symlink_to("/usr/lib")
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    assert foreign_folder(link / "s3kv") == link


def test_a_folder_of_ones_own_will_do_wherever_it_is(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    settings = agent_settings(tmp_path / "shared" / "s3kv-0")
    with running_agent(settings):
        Connection.open(settings.agent.socket, "cli", timeout_s=5).close()
