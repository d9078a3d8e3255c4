# SPDX-License-Identifier: Apache-2.0
"""A port for a program that the test starts and that has to be told its port."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A free port below the range from which the kernel takes ports for outgoing connections.

    One from that range, which is what port 0 gives, may be taken by any client between our look and the program's bind.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
