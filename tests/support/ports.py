# SPDX-License-Identifier: Apache-2.0
"""Ports for programs that the test starts and that have to be told theirs.

All are below the range from which the kernel takes ports for outgoing connections: one from that range, which is what port 0
gives, may be taken by any client between our look and the program's bind; and a client that asks for one where nobody
listens may be given that very port for its own end, and finds itself. And each process of tests has ports that no other one
gives away: those of a lane beside this one look at the same machine, and a program needs seconds until it binds.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_FIRST, _EACH, _PROCESSES = 30_000, 380, 7
"""Above those that Slurm's services have by chance, and those that tests of the local fleet name themselves."""
_SERVICES = 100
"""So many of a process's ports are for drivers, which choose among them by themselves."""
_APART = 6
"""A program that was told one port may take the next ones, too, if they are free."""
_TURN = threading.Lock()


def free_port() -> int:
    """A free one; none is given twice until all others were."""
    with _TURN:
        return next(port for port in _turns() if _is_free(port))


def service_ports(count: int = _SERVICES) -> tuple[int, int]:
    """The first and the last of those from which a driver of this process may choose. `free_port` gives none of them."""
    last = _own() + _EACH - 1
    return last - count + 1, last


@contextmanager
def launchers_ports() -> Iterator[None]:
    """Have 8080 to 8199 to oneself: `headrace service` gives its services the lowest that nobody listens on yet."""
    with socket.socket(socket.AF_UNIX) as lock:
        while not _has(lock, "headrace-tests-8080"):
            time.sleep(0.05)  # the test's own time-out is the limit
        yield


@cache
def _turns() -> Iterator[int]:
    return itertools.cycle(range(_own(), _own() + _EACH - _SERVICES - _APART, _APART))


@cache
def _own() -> int:
    """The first port of this process. The lock is a name that the kernel lets go of when the process ends."""
    for number in itertools.cycle(range(_PROCESSES)):
        lock = socket.socket(socket.AF_UNIX)
        if _has(lock, f"headrace-tests-ports-{number}"):
            lock.detach()
            return _FIRST + number * _EACH
        lock.close()
        time.sleep(0.01)  # the test's own time-out is the limit
    raise RuntimeError("a circle has no end")


def _has(lock: socket.socket, name: str) -> bool:
    """Whether we have the name now. It is no file's: it begins with a zero byte, and is of this network, as ports are."""
    try:
        lock.bind(f"\0{name}")
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
