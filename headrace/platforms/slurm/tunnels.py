# SPDX-License-Identifier: Apache-2.0
"""SSH tunnels from a port of the loopback interface to a service's node; each is an ssh process of its own.

A tunnel outlives the process that opened it. Its record (arguments, pid, start time, boot) is written before ssh is started:
the tunnel is found again after any crash, and no other process is ever killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, Unavailable
from headrace.core.files import FileLock, write_json
from headrace.platforms.contract import is_job_id
from headrace.platforms.node_resources import LOOPBACK, free_port, is_port_free, is_port_open
from headrace.platforms.processes import boot_id, command_line, read_record, read_stat

_RECORD = "launch.json"
_OPEN_SECONDS = 20.0
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class Tunnel:
    """A tunnel that is alive."""

    pid: int
    started: int
    port: int


class Tunnels:
    """The tunnels of one state folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Tunnels whose ssh is a child of this process, which has to reap it."""

    def find(self, job_id: str) -> Tunnel | None:
        """Return the tunnel of a job, if it is alive."""
        self._reap()
        record = read_record(self._folder / job_id / _RECORD)
        return None if record is None else _find_process(record)

    async def ensure(
        self, job_id: str, ssh: Sequence[str], target: str, port: int | None, environment: Mapping[str, str]
    ) -> Tunnel:
        """Return the job's tunnel to `target`, "HOST:PORT"; open it again if it died. `ssh`: arguments, the host last.

        Raises FailedPrecondition if another program uses `port`, Unavailable if ssh cannot connect.
        """
        async with self._lock(job_id).hold():
            record = read_record(self._folder / job_id / _RECORD)
            tunnel = _find_process(record) if record else None
            if tunnel is not None:
                return tunnel
            local_port = port or (int(record["port"]) if record else 0)
            if not local_port or (port is None and not is_port_free(LOOPBACK, local_port)):
                local_port = free_port()
            if not is_port_free(LOOPBACK, local_port):
                raise FailedPrecondition(
                    f"port {local_port} of this machine, for the tunnel of {job_id}, is taken: free it"
                )
            *options, dashes, host = ssh
            forward = ["-N", "-o", "ExitOnForwardFailure=yes", "-L", f"{LOOPBACK}:{local_port}:{target}"]
            return await self._open(job_id, [*options, *forward, dashes, host], local_port, environment)

    async def stop(self, job_id: str) -> None:
        """Stop the job's tunnel and remove its record. Succeeds if there is none."""
        folder = self._folder / job_id
        if not is_job_id(job_id) or not folder.is_dir():
            return
        async with self._lock(job_id).hold():
            limit = time.monotonic() + _STOP_SECONDS
            number = signal.SIGTERM
            while (tunnel := self.find(job_id)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(tunnel.pid, number)
                if time.monotonic() > limit:
                    number = signal.SIGKILL
                await asyncio.sleep(_POLL_SECONDS)
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()

    def close(self) -> None:
        """Leave the tunnels running: another process reaps them. Without this Python warns about left children."""
        for child in self._children.values():
            child.returncode = child.poll() or 0
        self._children.clear()

    def _lock(self, job_id: str) -> FileLock:
        """Return the lock of a job's tunnel. The lock file is removed with the tunnel; `FileLock` allows that."""
        return FileLock(self._folder / job_id / "lock")

    async def _open(self, job_id: str, argv: list[str], port: int, environment: Mapping[str, str]) -> Tunnel:
        folder = self._folder / job_id
        # The key `words` is part of the file format.
        record: dict[str, Any] = {"words": argv, "port": port, "boot": boot_id(), "pid": 0, "started": 0}
        write_json(folder / _RECORD, record)
        child = _spawn(argv, folder / "output", environment)
        try:
            stat = read_stat(child.pid)
            started = stat.started if stat else 0
            write_json(folder / _RECORD, {**record, "pid": child.pid, "started": started})
            await _wait_open(child, port, folder / "output")
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


def _find_process(record: Mapping[str, Any]) -> Tunnel | None:
    """Return the process of a record, if it is alive."""
    if record.get("boot") != boot_id():
        return None
    argv, port = list(record["words"]), int(record["port"])
    if record["pid"]:
        stat = read_stat(record["pid"])
        if stat is None or not stat.is_alive or stat.started != record["started"]:
            return None
        if command_line(stat.pid) not in (argv, []):  # no arguments: the kernel is in the middle of an exec
            return None
        return Tunnel(stat.pid, stat.started, port)
    # Its parent died before it recorded the pid: the arguments, with the port among them, identify the process.
    for name in os.listdir("/proc"):
        if name.isdigit() and command_line(int(name)) == argv:
            stat = read_stat(int(name))
            if stat is not None and stat.is_alive:
                return Tunnel(stat.pid, stat.started, port)
    return None


async def _wait_open(child: subprocess.Popen[bytes], port: int, output: Path) -> None:
    limit = time.monotonic() + _OPEN_SECONDS
    while child.poll() is None:
        if is_port_open(port):
            return
        if time.monotonic() > limit:
            raise Unavailable(f"the tunnel was not open after {_OPEN_SECONDS:g} s; check the login node")
        await asyncio.sleep(_POLL_SECONDS)
    raise Unavailable(f"the tunnel cannot be opened: {_last_line(output) or f'ssh ended with {child.returncode}'}")


def _spawn(argv: Sequence[str], output: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start ssh in a session of its own: it outlives this process."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(  # noqa: S603  # ssh without a shell; its arguments were checked
            argv,
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
