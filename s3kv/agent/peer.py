"""Who may connect, and when the process at the other end of a socket has exited.

A lease ends when its holder gave it back or has exited, never by a clock: a stopped engine may still be copying. So
every client that may touch slots is watched through a pidfd.
"""

from __future__ import annotations

import socket

from s3kv.client.trust import Peer, pidfd_of
from s3kv.errors import ProtocolError


def may_connect(peer: Peer, own_uid: int) -> bool:
    """The agent's own user and root: whoever can map an arena can read every prompt's KV in it."""
    return peer.uid in (own_uid, 0)


def open_pidfd(sock: socket.socket) -> int:
    """A descriptor that becomes readable when the peer exits. Raises ProtocolError when the peer cannot be watched."""
    try:
        return pidfd_of(sock)
    except OSError as error:
        raise ProtocolError(
            "the agent cannot see this process, so it could not tell when its memory is free again: "
            "run both in one PID namespace, or on Linux 6.5 or later"
        ) from error
