# SPDX-License-Identifier: Apache-2.0
"""The end of a connection while a client is still reading its last answer."""

from __future__ import annotations

import socket

import h2.config
import h2.connection
import h2.settings

from support.serving import echo_site, serving

SIZE = 12_000_000


def test_a_slow_reader_gets_all_of_its_answer_after_a_drain() -> None:
    with serving(echo_site()) as server, socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        client.initiate_connection()
        client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
        client.increment_flow_control_window(2**31 - 1 - 65_535)
        fields = [(":method", "GET"), (":scheme", "http"), (":path", f"/big/{SIZE}"), (":authority", "x")]
        client.send_headers(1, fields, end_stream=True)
        sock.sendall(client.data_to_send())
        first = sock.recv(9)
        server.call(lambda: [connection.drain() for connection in server.site.connections])
        for _ in range(4):
            server.sweep(5.0)
        # Frames by hand from here on: the h2 package takes nothing more after a GOAWAY.
        stream, received, head = sock.makefile("rb"), 0, first
        while True:
            payload = stream.read(int.from_bytes(head[:3], "big"))
            if head[3] == 0:
                received += len(payload)
                if head[4] & 1:
                    break
            head = stream.read(9)
            assert len(head) == 9, f"cut after {received} bytes"
        stream.close()
        assert received == SIZE
