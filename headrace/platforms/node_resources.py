# SPDX-License-Identifier: Apache-2.0
"""GPUs and ports of this machine: which are there, which are free, and how they are assigned to services.

The process driver and the local fleet use it; no GPU driver library is loaded.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from headrace.core.errors import ResourceExhausted
from headrace.core.files import FileLock

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")
LOOPBACK = "127.0.0.1"
_DEVICE = re.compile(r"nvidia[0-9]+")


def visible_gpus(environ: Mapping[str, str], devices: Path = DEVICES) -> tuple[str, ...]:
    """Return the GPUs that services may use, as CUDA_VISIBLE_DEVICES names them; none on a machine without GPUs."""
    try:
        count = sum(1 for name in os.listdir(devices) if _DEVICE.fullmatch(name))
    except OSError:
        return ()
    if GPU_VARIABLE not in environ:
        return tuple(str(index) for index in range(count))
    gpus: list[str] = []
    for entry in environ[GPU_VARIABLE].split(","):
        name = entry.strip()
        # CUDA stops at the first entry it does not know; -1 is the usual way to write "none".
        if not name or name.startswith("-"):
            break
        gpus.append(name)
    return tuple(gpus[:count])


def choose_gpus(visible: Collection[str], taken: Collection[str], count: int) -> tuple[str, ...]:
    """Return the first `count` GPUs that are free. Raises ResourceExhausted if there are too few."""
    free = [gpu for gpu in visible if gpu not in taken]
    if len(free) < count:
        raise ResourceExhausted(
            f"the service needs {count} GPU(s), and of {len(visible)} here {len(free)} are free: stop a service, or ask for "
            "fewer"
        )
    return tuple(free[:count])


def gpu_lock(root: Path) -> FileLock:
    """Return the lock under which GPUs are chosen and recorded, so that two starts do not choose the same GPU."""
    return FileLock(root / "gpus.lock")


class PortAllocator:
    """Port claims in a folder, one file per port, so that processes that share the folder never use the same port.

    A claim does not cover other programs, so a port is also bound once before it is assigned. Ports are assigned in turn: a
    client may still remember a port that was just released. The first port depends on the folder: a service takes seconds
    until it listens, and allocators with different folders would otherwise all start with the same port.
    """

    def __init__(self, folder: Path, host: str, first: int, last: int) -> None:
        self._folder = folder
        self._host = host
        self._first, self._last = first, last

    def claim(self, owner: str, is_known: Callable[[str], bool], requested: int | None = None) -> int:
        """Claim the next free port, or the one that is `requested`. Claims of owners that are not `is_known` are dropped."""
        with self._locked() as lock:
            taken = self._claims(is_known)
            if requested is not None:
                if requested in taken or not is_port_free(self._host, requested):
                    raise ResourceExhausted(
                        f"port {requested} of {self._host} is in use: start the service on another one"
                    )
                (self._folder / str(requested)).write_text(owner)
                return requested
            count = self._last - self._first + 1
            last = os.pread(lock, 16, 0)
            first = zlib.crc32(os.fsencode(self._folder.absolute()))
            start = int(last) - self._first + 1 if last.isdigit() else first
            for step in range(count):
                port = self._first + (start + step) % count
                if port not in taken and is_port_free(self._host, port):
                    (self._folder / str(port)).write_text(owner)
                    os.pwrite(lock, b"%05d" % port, 0)
                    return port
        raise ResourceExhausted(
            f"no port from {self._first} to {self._last} is free for a service; stop one, or give a larger range"
        )

    def release(self, owner: str) -> None:
        """Release all ports of an owner."""
        with self._locked():
            for path in self._claim_files():
                if path.read_text() == owner:
                    path.unlink(missing_ok=True)

    def _claims(self, is_known: Callable[[str], bool]) -> set[int]:
        taken: set[int] = set()
        for path in self._claim_files():
            if is_known(path.read_text()):
                taken.add(int(path.name))
            else:
                path.unlink(missing_ok=True)
        return taken

    def _claim_files(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.name.isascii() and path.name.isdigit()]

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock; its file stores the port that was assigned last."""
        with FileLock(self._folder / ".lock") as lock:
            yield lock.descriptor


def is_port_free(host: str, port: int) -> bool:
    """Whether a service could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            # A listener that shares its port lets us bind, and refuses only now.
            sock.listen(1)
        except OSError:
            return False
    return True


def is_port_open(port: int, seconds: float = 1.0) -> bool:
    """Whether a server accepts connections on a port of the loopback interface."""
    with socket.socket() as sock:
        sock.settimeout(seconds)
        return sock.connect_ex((LOOPBACK, port)) == 0


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        return int(sock.getsockname()[1])
