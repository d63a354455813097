"""Who is at the other end of a Unix socket, and whether the folder that it lies in is in good hands.

In a folder where anybody may create names (/tmp) a name belongs to whoever came first: another user could make the
socket's folder there, serve in it, and read the KV of the engine that believes it found its agent.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """The process that connected, or that listened, as the kernel says it."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


def pidfd_of(sock: socket.socket) -> int:
    """A descriptor that becomes readable when the peer exits. Raises OSError when the peer cannot be watched.

    SO_PEERPIDFD (Linux 6.5) gives one even across PID namespaces; before that the process has to be seen from here.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(peer_of(sock).pid)


def has_exited(pidfd: int) -> bool:
    """False when it is not known (-1), too."""
    poll = select.poll()
    if pidfd >= 0:
        poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def may_serve(peer: Peer, own_uid: int, path: Path) -> bool:
    """Whether the listener at `path` may be this user's agent: it is this user's, or root's.

    Root also uses an agent of another user, as services have one, where root alone decided who may put a socket.
    """
    return peer.uid in (own_uid, 0) or (own_uid == 0 and not open_to_all(path.parent))


def open_to_all(folder: Path) -> bool:
    """Whether anybody may create names in `folder`, or in a folder above it."""
    folder = folder.resolve()
    return any(each.stat().st_mode & stat.S_IWOTH for each in (folder, *folder.parents))


def foreign_folder(folder: Path) -> Path | None:
    """`folder`, or a folder above it, that another user made (root aside) where anybody may create names."""
    for name in (folder, *folder.parents):
        try:
            above, own = name.parent.stat(), name.lstat()
        except FileNotFoundError:
            continue
        if above.st_mode & stat.S_IWOTH and own.st_uid not in (0, os.geteuid()):
            return name
    return None
