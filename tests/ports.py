# SPDX-License-Identifier: Apache-2.0
"""A port for a program that the test starts and that has to be told its port."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from functools import cache

_FIRST, _BLOCK, _BLOCKS = 20_000, 600, 20
_APART = 6
"""A program that was told one port may take the next ones, too, if they are free."""
_TURN = threading.Lock()


def free_port() -> int:
    """A free port below the range from which the kernel takes ports for outgoing connections, for this program alone.

    One from that range, which is what port 0 gives, may be taken by any client between our look and the program's bind;
    and a client that asks for one where nobody listens may be given that very port for its own end, and finds itself. One
    that was given out already is not free, although nobody may listen there yet; nor is one that other tests have.
    """
    with _TURN:
        return next(_ports())


@cache
def _ports() -> Iterator[int]:
    """The free ports of this program's block, one after the other, again and again."""
    first, holding = _block()

    def turns() -> Iterator[int]:
        while holding.fileno() >= 0:
            for port in range(first, first + _BLOCK, _APART):
                if _is_free(port):
                    yield port

    return turns()


def _block() -> tuple[int, socket.socket]:
    """The first port of a block that no other program has, and what says so: a name that the kernel gives to one alone."""
    for number in random.sample(range(_BLOCKS), _BLOCKS):
        holding = socket.socket(socket.AF_UNIX)
        try:
            holding.bind(f"\0headrace-tests-ports-{number}")
        except OSError:
            holding.close()
            continue
        return _FIRST + number * _BLOCK, holding
    raise RuntimeError("too many programs of tests at once")


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
