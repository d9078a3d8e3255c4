# SPDX-License-Identifier: Apache-2.0
"""Ports for services of this machine: each is claimed by a file, so that gateways that share the folder never collide.

Used by `process`. A claim alone would miss strangers that listen, so a port is also bound once before it is given out. Ports
are given out in turn: one that was just given back may still be in somebody's memory as another service's. Where the turn
begins depends on the folder: a service needs seconds until it listens, and gateways with a folder each would otherwise all
give their first service the same port.
"""

from __future__ import annotations

import fcntl
import os
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.core.errors import ResourceExhausted


class Ports:
    """The claims of one folder."""

    def __init__(self, folder: Path, host: str, first: int, last: int) -> None:
        self._folder = folder
        self._host = host
        self._first, self._last = first, last

    def claim(self, job_id: str, is_known: Callable[[str], bool], wanted: int | None = None) -> int:
        """The next free port, or `wanted`, for this job. Claims of jobs that are not `is_known` any more are taken over."""
        with self._alone() as lock:
            taken = self._claims(is_known)
            if wanted is not None:
                if wanted in taken or not is_free(self._host, wanted):
                    raise ResourceExhausted(
                        f"port {wanted} of {self._host} is in use: start the service on another one"
                    )
                (self._folder / str(wanted)).write_text(job_id)
                return wanted
            count = self._last - self._first + 1
            last = os.pread(lock, 16, 0)
            begins = zlib.crc32(os.fsencode(self._folder.absolute()))
            start = int(last) - self._first + 1 if last.isdigit() else begins
            for step in range(count):
                port = self._first + (start + step) % count
                if port not in taken and is_free(self._host, port):
                    (self._folder / str(port)).write_text(job_id)
                    os.pwrite(lock, b"%05d" % port, 0)
                    return port
        raise ResourceExhausted(
            f"no port from {self._first} to {self._last} is free for a service; stop one, or give a larger range"
        )

    def release(self, job_id: str) -> None:
        """Give back what a job has claimed."""
        with self._alone():
            for path in self._files():
                if path.read_text() == job_id:
                    path.unlink(missing_ok=True)

    def _claims(self, is_known: Callable[[str], bool]) -> set[int]:
        taken: set[int] = set()
        for path in self._files():
            if is_known(path.read_text()):
                taken.add(int(path.name))
            else:
                path.unlink(missing_ok=True)
        return taken

    def _files(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.name.isascii() and path.name.isdigit()]

    @contextmanager
    def _alone(self) -> Iterator[int]:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)


def is_free(host: str, port: int) -> bool:
    """Whether a service could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            # Another listener that allows to share its port lets us bind, and only now refuses.
            sock.listen(1)
        except OSError:
            return False
    return True
