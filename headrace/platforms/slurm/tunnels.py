# SPDX-License-Identifier: Apache-2.0
"""Tunnels: a port of this machine's loopback that is forwarded by an ssh of its own to a service's node. Called by `driver`.

A tunnel outlives whoever made it. A file for each says which process it is (words, pid, start time, boot), and is written
before the process is started: so it is found again after any crash, and nothing else is ever killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, Unavailable
from headrace.platforms.folders import is_id, read_meta, write_whole
from headrace.platforms.identity import boot, command_of, stat_of
from headrace.platforms.ports import is_free

LOOPBACK = "127.0.0.1"
_OPEN_SECONDS = 20.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class Tunnel:
    """One that lives."""

    pid: int
    started: int
    port: int


class Tunnels:
    """Those of one state folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Those that this very process started: their ends have to be taken note of, or they stay as zombies."""

    def living(self, job_id: str) -> Tunnel | None:
        """The tunnel of a job, if there is one."""
        self._reap()
        record = read_meta(self._folder / job_id)
        return None if record is None else _living(record)

    async def ensure(
        self, job_id: str, ssh: Sequence[str], target: str, port: int | None, environment: Mapping[str, str]
    ) -> Tunnel:
        """The job's tunnel to `target`, "HOST:PORT", made anew where it died. `ssh`: its words, the host as the last one.

        Raises FailedPrecondition where `port` is another's, Unavailable where ssh does not get through.
        """
        async with self._lock(job_id):
            record = read_meta(self._folder / job_id)
            found = _living(record) if record else None
            if found is not None:
                return found
            wanted = port or (int(record["port"]) if record else 0)
            if not wanted or (port is None and not is_free(LOOPBACK, wanted)):
                wanted = _free_port()
            if not is_free(LOOPBACK, wanted):
                raise FailedPrecondition(
                    f"port {wanted} of this machine, for the tunnel of {job_id}, is taken: free it"
                )
            *words, dashes, host = ssh
            forward = ["-N", "-o", "ExitOnForwardFailure=yes", "-L", f"{LOOPBACK}:{wanted}:{target}"]
            return await self._open(job_id, [*words, *forward, dashes, host], wanted, environment)

    async def end(self, job_id: str) -> None:
        """End the job's tunnel and forget it; nothing to end is success."""
        folder = self._folder / job_id
        if not is_id(job_id) or not folder.is_dir():
            return
        async with self._lock(job_id):
            limit = time.monotonic() + _END_SECONDS
            number = signal.SIGTERM
            while (found := self.living(job_id)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found.pid, number)
                if time.monotonic() > limit:
                    number = signal.SIGKILL
                await asyncio.sleep(_POLL_SECONDS)
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()

    def close(self) -> None:
        """They run on; whoever adopts them reaps them: without this Python would warn that they were left."""
        for child in self._children.values():
            child.returncode = child.poll() or 0
        self._children.clear()

    async def _open(self, job_id: str, words: list[str], port: int, environment: Mapping[str, str]) -> Tunnel:
        folder = self._folder / job_id
        record: dict[str, Any] = {"words": words, "port": port, "boot": boot(), "pid": 0, "started": 0}
        write_whole(folder / "launch.json", record)
        child = _spawn(words, folder / "told", environment)
        try:
            stat = stat_of(child.pid)
            started = stat.started if stat else 0
            write_whole(folder / "launch.json", {**record, "pid": child.pid, "started": started})
            await _until_open(child, port, folder / "told")
        except BaseException:
            child.kill()
            child.wait()
            raise
        self._children[child.pid] = child
        return Tunnel(child.pid, started, port)

    def _reap(self) -> None:
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                del self._children[pid]

    @contextlib.asynccontextmanager
    async def _lock(self, job_id: str) -> AsyncIterator[None]:
        """One at a time for each job, of all processes. The lock's file goes with the tunnel: so it is looked at again."""
        path = self._folder / job_id / "lock"
        while True:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                        break
            except BlockingIOError:
                await asyncio.sleep(_POLL_SECONDS)
            os.close(descriptor)
        try:
            yield
        finally:
            os.close(descriptor)


def _living(record: Mapping[str, Any]) -> Tunnel | None:
    """The very process of a record, if it lives."""
    if record.get("boot") != boot():
        return None
    words, port = list(record["words"]), int(record["port"])
    if record["pid"]:
        stat = stat_of(record["pid"])
        if stat is None or not stat.lives or stat.started != record["started"]:
            return None
        if command_of(stat.pid) not in (words, []):  # none at all: it has just been started, and is about to have them
            return None
        return Tunnel(stat.pid, stat.started, port)
    # Whoever started it died before it could say which it is: all of its words, its port among them, are unmistakable.
    for name in os.listdir("/proc"):
        if name.isdigit() and command_of(int(name)) == words:
            stat = stat_of(int(name))
            if stat is not None and stat.lives:
                return Tunnel(stat.pid, stat.started, port)
    return None


async def _until_open(child: subprocess.Popen[bytes], port: int, told: Path) -> None:
    limit = time.monotonic() + _OPEN_SECONDS
    while child.poll() is None:
        if _answers(port):
            return
        if time.monotonic() > limit:
            raise Unavailable(f"the tunnel was not open after {_OPEN_SECONDS:g} s; look at the login node")
        await asyncio.sleep(_POLL_SECONDS)
    raise Unavailable(f"the tunnel cannot be made: {_last_line(told) or f'ssh ended with {child.returncode}'}")


def _spawn(words: Sequence[str], told: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """In a session of its own: it outlives this process."""
    descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(  # noqa: S603  # ssh by its words, which were checked
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=descriptor,
            cwd="/",
            env=dict(environment),
            start_new_session=True,
        )
    except FileNotFoundError:
        raise FailedPrecondition("the program 'ssh' is not installed here, or not on the PATH") from None
    finally:
        os.close(descriptor)


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""


def _answers(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex((LOOPBACK, port)) == 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        return int(sock.getsockname()[1])
