# SPDX-License-Identifier: Apache-2.0
"""Port forwardings by `brev port-forward` that outlive the process that opened them: one per service, found by its job id.

The driver calls it in threads. brev leaves its ssh behind and exits, so a forwarding is identified by its session and by the
ports on its command line; nothing else is ever killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, Unavailable
from headrace.core.files import FileLock, read_json, write_json
from headrace.platforms.log_files import last_lines
from headrace.platforms.node_resources import LOOPBACK, free_port, is_port_free, is_port_open
from headrace.platforms.processes import Stat, boot_id, command_line, session_members

_KEYS = ("session", "boot", "local", "remote", "instance")
_POLL_SECONDS = 0.05
_MAX_MISSES = 5


class Tunnels:
    """The forwardings of one state folder."""

    def __init__(self, folder: Path, program: str, seconds: float) -> None:
        self._folder = folder.expanduser()
        self._program = program
        self._seconds = seconds
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def open(self, job_id: str, instance: str, remote_port: int) -> int:
        """Return the local port that leads to the service; a forwarding that died is opened again at the same port."""
        with self._lock():
            record = self._read(job_id)
            if record is not None and (record["instance"], record["remote"]) == (instance, remote_port):
                if self._members(record):
                    return int(record["local"])
                return self._spawn(job_id, instance, remote_port, int(record["local"]))
            if record is not None:
                self._stop(record)
            return self._spawn(job_id, instance, remote_port, remote_port)

    def close(self, job_id: str) -> None:
        """Stop the forwarding of a service. Succeeds if there is none."""
        with self._lock():
            record = self._read(job_id)
            if record is not None:
                self._stop(record)
            (self._folder / f"{job_id}.json").unlink(missing_ok=True)
            (self._folder / f"{job_id}.log").unlink(missing_ok=True)

    def detach(self) -> None:
        """Leave the forwardings running when this process ends."""
        for child in self._children.values():
            child.returncode = child.poll() or 0
        self._children.clear()

    def _spawn(self, job_id: str, instance: str, remote: int, port: int) -> int:
        local = port if is_port_free(LOOPBACK, port) else free_port()
        log_path = self._folder / f"{job_id}.log"
        out = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            child = subprocess.Popen(  # noqa: S603  # no shell; the instance's name was checked
                [self._program, "port-forward", instance, "-p", f"{local}:{remote}"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        except OSError:
            raise FailedPrecondition(f"the program {self._program!a} cannot be run here") from None
        finally:
            os.close(out)
        self._children[child.pid] = child
        record = {"session": child.pid, "boot": boot_id(), "local": local, "remote": remote, "instance": instance}
        write_json(self._folder / f"{job_id}.json", record)
        limit = time.monotonic() + self._seconds
        misses = 0
        while not is_port_open(local, 2.0):
            child.poll()
            # While brev exits and its ssh starts, neither may be visible.
            misses = 0 if self._members(record) else misses + 1
            if misses > _MAX_MISSES or time.monotonic() > limit:
                self._stop(record)
                reason = last_lines(log_path, 1, 4096) or "it printed no reason"
                raise Unavailable(f"`brev port-forward {instance} -p {local}:{remote}` does not work: {reason[:500]}")
            time.sleep(_POLL_SECONDS)
        child.poll()
        return local

    def _members(self, record: dict[str, Any]) -> list[Stat]:
        if record["boot"] != boot_id():
            return []
        members = session_members(int(record["session"]))
        ports = f"{record['local']}:"
        is_ours = any(arg.startswith(ports) for member in members for arg in command_line(member.pid))
        return members if is_ours else []

    def _stop(self, record: dict[str, Any]) -> None:
        members = self._members(record)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for member in members:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member.pid, number)
            limit = time.monotonic() + 2.0
            while (members := session_members(int(record["session"])) if members else []) and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS)
        child = self._children.pop(int(record["session"]), None)
        if child is not None:
            child.wait()

    def _read(self, job_id: str) -> dict[str, Any] | None:
        record = read_json(self._folder / f"{job_id}.json")
        return record if record is not None and all(key in record for key in _KEYS) else None

    def _lock(self) -> FileLock:
        return FileLock(self._folder / ".lock")
