# SPDX-License-Identifier: Apache-2.0
"""What a client of each protocol sends, byte by byte, so that it can be sent again and broken off anywhere.

sent = recorded("v2 grpc", server.ports, "echo")
begin(server.ports.http, sent[:40])      # a socket on which so much was sent
"""

from __future__ import annotations

import socket
import struct
import threading

from chaos_clients import CLIENTS, Ports

NUMBER = 1_234_567


class _Relay:
    """Passes one connection at a time on to a server and keeps what the client said."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            back = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
            back.start()
            try:
                while piece := client.recv(65536):
                    self.sent += piece
                    server.sendall(piece)
                server.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            back.join(30)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(30)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(65536):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def recorded(protocol: str, ports: Ports, model: str) -> bytes:
    """All that a client of this protocol sends until it has its answer."""
    relay = _Relay(ports.http)  # every port speaks every protocol
    client = CLIENTS[protocol](Ports(relay.port, relay.port), model)
    try:
        assert client.ask(NUMBER) == NUMBER
        sent = relay.sent
    finally:
        client.close()
        relay.close()
    return sent


def begin(port: int, content: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=100)
    client.sendall(content)
    return client


def leave(client: socket.socket, *, abruptly: bool) -> None:
    """Close: with a FIN, or with a RST, as a process that died or a cable that was pulled and put back would."""
    if abruptly:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
