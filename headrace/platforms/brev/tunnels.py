# SPDX-License-Identifier: Apache-2.0
"""Forwardings by `brev port-forward` that outlive whoever made them: one for each service, found by its job's id.

Called by `driver`, in threads. brev leaves its ssh behind and ends, so a forwarding is known by its session and by the
ports on its command line, and never killed by anything less.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, Unavailable
from headrace.platforms.folders import write_whole
from headrace.platforms.identity import Stat, boot, command_of, session_members
from headrace.platforms.logs import last_lines
from headrace.platforms.ports import is_free

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.05
_MISSED = 5


class Tunnels:
    """Those of one folder."""

    def __init__(self, folder: Path, program: str, seconds: float) -> None:
        self._folder = folder.expanduser()
        self._program = program
        self._seconds = seconds
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def open(self, job_id: str, instance: str, remote_port: int) -> int:
        """The port of this machine that leads to the service; a forwarding that died is made anew, at the same port."""
        with self._alone():
            meta = self._read(job_id)
            if meta is not None and (meta["instance"], meta["remote"]) == (instance, remote_port):
                if self._members(meta):
                    return int(meta["local"])
                return self._spawn(job_id, instance, remote_port, int(meta["local"]))
            if meta is not None:
                self._end(meta)
            return self._spawn(job_id, instance, remote_port, remote_port)

    def close(self, job_id: str) -> None:
        """End a service's forwarding; none is fine."""
        with self._alone():
            meta = self._read(job_id)
            if meta is not None:
                self._end(meta)
            (self._folder / f"{job_id}.json").unlink(missing_ok=True)
            (self._folder / f"{job_id}.log").unlink(missing_ok=True)

    def known(self) -> set[str]:
        """The jobs that have one."""
        return {path.stem for path in self._folder.glob("*.json")} if self._folder.is_dir() else set()

    def let_go(self) -> None:
        """This process ends, the forwardings stay."""
        for child in self._children.values():
            child.returncode = child.poll() or 0
        self._children.clear()

    def _spawn(self, job_id: str, instance: str, remote: int, wanted: int) -> int:
        local = wanted if is_free(_HOST, wanted) else _free_port()
        path = self._folder / f"{job_id}.log"
        out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            child = subprocess.Popen(  # noqa: S603  # words, no shell; the instance's name was checked
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
        meta = {"session": child.pid, "boot": boot(), "local": local, "remote": remote, "instance": instance}
        write_whole(self._folder / f"{job_id}.json", meta)
        limit = time.monotonic() + self._seconds
        missed = 0
        while not _listens(local):
            child.poll()
            # While brev leaves and its ssh comes, a look may see neither.
            missed = 0 if self._members(meta) else missed + 1
            if missed > _MISSED or time.monotonic() > limit:
                self._end(meta)
                told = last_lines(path, 1, 4096) or "it does not say why"
                raise Unavailable(f"`brev port-forward {instance} -p {local}:{remote}` does not work: {told[:500]}")
            time.sleep(_POLL_SECONDS)
        child.poll()
        return local

    def _members(self, meta: dict[str, Any]) -> list[Stat]:
        if meta["boot"] != boot():
            return []
        members = session_members(int(meta["session"]))
        ports = f"{meta['local']}:"
        ours = any(word.startswith(ports) for member in members for word in command_of(member.pid))
        return members if ours else []

    def _end(self, meta: dict[str, Any]) -> None:
        members = self._members(meta)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for member in members:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member.pid, number)
            limit = time.monotonic() + 2.0
            while (members := session_members(int(meta["session"])) if members else []) and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS)
        child = self._children.pop(int(meta["session"]), None)
        if child is not None:
            child.wait()

    def _read(self, job_id: str) -> dict[str, Any] | None:
        try:
            found = json.loads((self._folder / f"{job_id}.json").read_bytes())
        except (OSError, ValueError):
            return None
        wanted = ("session", "boot", "local", "remote", "instance")
        return found if isinstance(found, dict) and all(key in found for key in wanted) else None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((_HOST, port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
