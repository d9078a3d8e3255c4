# SPDX-License-Identifier: Apache-2.0
"""The processes of ranks on this machine: started for a group, and kept as spares that have imported what they need.

Importing PyTorch and transformers takes seconds, so that a group with spares is back much sooner after a rank has ended.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from threading import Lock
from typing import Protocol

from headrace.backends.llm.tensor_parallel.link import Link
from headrace.core.exit_status import describe_exit

log = logging.getLogger("headrace.backends.llm")

_STUB = Path(__file__).with_name("rank_stub.py")
_ROOT = Path(__file__).resolve().parents[4]


class RankProcess(Protocol):
    """A process that is a rank or can become one."""

    link: Link

    @property
    def node(self) -> str:
        """Which node it is on, for messages; "" for this one."""

    @property
    def place(self) -> str:
        """Which process it is, for messages."""

    def path_of(self, model_folder: Path, path: Path) -> str:
        """Return a path of this node as its node has it. `model_folder` is the folder of the model here."""

    def ending(self, wait_seconds: float = 0.0) -> str | None:
        """Return how it has ended; None if it runs after so many seconds. From any thread."""

    def kill(self) -> None:
        """Kill it. From any thread."""

    def end(self) -> None:
        """Kill it and free what it held."""


class RankSource(Protocol):
    """Where a group gets its processes."""

    host: str
    """Where the ranks of other nodes reach this one, known when they are started; "" if all are on this node."""

    def take(self, count: int) -> list[RankProcess]:
        """Return processes for all ranks but the first."""

    def prepare(self, count: int) -> None:
        """Have so many spares soon: the ranks that were taken last are in their group."""

    def close(self) -> None:
        """End the spares."""


class LocalProcess:
    """A child process."""

    node = ""

    def __init__(self, title: str, threads: int) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)} if threads else dict(os.environ)
        with theirs:
            try:
                self._popen = subprocess.Popen(  # noqa: S603  # our own file
                    [sys.executable, "-u", str(_STUB), str(theirs.fileno()), str(os.getpid()), str(_ROOT), title],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            except OSError:
                ours.close()
                raise
        self.link = Link(ours)
        self.pid = self._popen.pid

    @property
    def place(self) -> str:
        """See `RankProcess`."""
        return f"process {self.pid}"

    def path_of(self, _model_folder: Path, path: Path) -> str:
        """See `RankProcess`."""
        return str(path)

    def ending(self, wait_seconds: float = 0.0) -> str | None:
        """See `RankProcess`."""
        try:
            return describe_exit(self._popen.wait(wait_seconds))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """See `RankProcess`."""
        self._popen.kill()

    def end(self) -> None:
        """See `RankProcess`."""
        self._popen.kill()
        self._popen.wait()
        self.link.close()


class LocalRanks:
    """Starts ranks as child processes. Implements `RankSource`; thread-safe."""

    host = ""

    def __init__(self, title: str, threads: int) -> None:
        """`threads`: of each rank on a CPU; 0 on a GPU."""
        self._title = title
        self._threads = threads
        self._spares: deque[LocalProcess] = deque()
        self._lock = Lock()
        self._closed = False

    def take(self, count: int) -> list[RankProcess]:
        """See `RankSource`."""
        return list(self.take_local(count))

    def take_local(self, count: int) -> list[LocalProcess]:
        """Return processes, spares first."""
        with self._lock:
            taken = [self._spares.popleft() for _ in range(min(count, len(self._spares)))]
        try:
            while len(taken) < count:
                taken.append(LocalProcess(self._title, self._threads))
        except BaseException:
            for process in taken:
                process.end()
            raise
        return taken

    def prepare(self, count: int) -> None:
        """See `RankSource`."""
        with self._lock:
            try:
                while len(self._spares) < count and not self._closed:
                    self._spares.append(LocalProcess(self._title, self._threads))
            except OSError:
                log.exception("No spare process for %s: it will be back later after a rank has ended.", self._title)

    def close(self) -> None:
        """See `RankSource`."""
        with self._lock:
            self._closed = True
            spares = list(self._spares)
            self._spares.clear()
        for process in spares:
            process.end()
