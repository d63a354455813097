"""One connection under several threads."""

from __future__ import annotations

import socket
import threading

from s3kv.client import protocol as p
from s3kv.client.connection import Connection


def frame(sock: socket.socket) -> p.Request:
    length = p.frame_length(sock.recv(p.LENGTH.size, socket.MSG_WAITALL))
    return p.decode_request(sock.recv(length, socket.MSG_WAITALL))


def test_a_message_is_sent_while_another_thread_waits_for_a_reply() -> None:
    """The executor's thread gives a lease back while a helper thread asks for slots."""
    ours, agent = socket.socketpair()
    connection = Connection(ours)
    reports: list[p.Report] = []
    waiting = threading.Thread(target=lambda: reports.append(connection.call(p.Status(7), p.Report, timeout_s=60)))
    waiting.start()
    assert frame(agent) == p.Status(7)
    connection.post(p.Release(1, 2, 0))
    assert frame(agent) == p.Release(1, 2, 0)
    assert not reports
    agent.sendall(p.encode(p.Report(7, b"{}")))
    waiting.join(60)
    assert reports == [p.Report(7, b"{}")]
    connection.close()
    agent.close()
