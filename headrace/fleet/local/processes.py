# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive the daemon: each in a session of its own, known by its number, its start and the machine's boot.

Used by `replica` and `routing`. A process that another daemon started is followed and ended like one of our own; only its
exit code stays unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.fleet.local import child
from headrace.platforms.identity import boot, session_members, stat_of, variables_of

_RUN = "HEADRACE_RUN"
"""A variable of each process here, and so of all that it starts: whose they are, when nobody else can tell any more."""
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.02
_PASSED_ON = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HF_HOME", "HF_ENDPOINT"}
)
_PASSED_ON_PREFIXES = (
    "LC_",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "CUDA_",
    "NVIDIA_",
    "OMP_",
    "MKL_",
    "SSL_CERT_",
    "XDG_",
)


@dataclass(frozen=True)
class Command:
    """What to run."""

    argv: tuple[str, ...]
    """Its first word is a path."""
    environment: Mapping[str, str]
    folder: Path
    """Where it starts."""
    listens: int | None = None
    """A descriptor of a socket that it is to accept from, if there is one; see `child`."""


class Process:
    """One process and all that it started."""

    def __init__(self, pid: int, started: int, boot_id: str, own: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._started = started
        self._boot = boot_id
        self._own = own

    @classmethod
    def found(cls, record: Mapping[str, Any] | None) -> Process | None:
        """The process of a record, if it lives. If it does not, what it has left behind is killed."""
        if not record:
            return None
        try:
            process = cls(int(record["pid"]), int(record["started"]), str(record["boot"]))
        except (KeyError, TypeError, ValueError):
            return None
        if process.lives:
            return process
        if process._boot == boot():
            _kill_left(process.pid, str(record.get("run", "")))
        return None

    @property
    def lives(self) -> bool:
        """Whether that very process does anything."""
        if self._own is not None and self._own.poll() is not None:
            return False
        if self._boot != boot():
            return False
        stat = stat_of(self.pid)
        return stat is not None and stat.lives and stat.started == self._started

    @property
    def _unreaped(self) -> bool:
        """Whether that very process has not gone. It looks dead when its first thread is; the others may hold its ports."""
        stat = stat_of(self.pid)
        return self._boot == boot() and stat is not None and stat.started == self._started

    async def ended(self) -> int | None:
        """Wait for its end. Its exit code, negative for a signal; None if nobody knows."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return self._code()
        loop = asyncio.get_running_loop()
        try:
            if self._unreaped:
                over = asyncio.Event()
                loop.add_reader(descriptor, over.set)
                try:
                    await over.wait()
                finally:
                    loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)
        return self._code()

    def signal(self, number: signal.Signals) -> None:
        """To itself, not to what it started."""
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def end(self, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL to all of its session when it is gone or the grace is over."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(grace_seconds, 0.0)):
                await self.ended()
        await self.kill()

    async def kill(self) -> None:
        """Nobody of its session is left after this, or ten seconds."""
        for _ in range(int(_KILL_SECONDS / _POLL_SECONDS)):
            if not self._kill_session():
                break
            await asyncio.sleep(_POLL_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                await self.ended()

    def let_go(self) -> None:
        """It runs on, and whoever adopts it reaps it: without this Python would warn that it was left."""
        if self._own is not None:
            self._own.returncode = self._own.poll() or 0

    def _kill_session(self) -> bool:
        if self._own is not None:
            self._own.poll()
        leader = stat_of(self.pid)
        if self._boot != boot() or (leader is not None and leader.started != self._started):
            return False  # the number is another's: a session of that number is, too
        members = session_members(self.pid)
        for each in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each.pid, signal.SIGKILL)
        return bool(members)

    def _code(self) -> int | None:
        return self._own.poll() if self._own is not None else None


def _kill_left(session: int, run: str) -> None:
    """What a process had started that ended while nobody looked. By their mark: the session may be another's by now."""
    mark = f"{_RUN}={run}".encode()
    for each in session_members(session):
        if run and mark in variables_of(each.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each.pid, signal.SIGKILL)


def spawn(command: Command, log: Path, record: Callable[[Mapping[str, Any]], None]) -> Process:
    """Start it. It does nothing before `record` has kept who it is. Raises OSError."""
    run = uuid.uuid4().hex
    listens = {} if command.listens is None else {child.LISTENS: str(command.listens)}
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        started = subprocess.Popen(  # noqa: S603  # no shell; what it runs is what the user's document says
            [sys.executable, "-I", "-S", child.__file__, *command.argv],
            stdin=subprocess.PIPE,
            stdout=descriptor,
            stderr=descriptor,
            cwd=command.folder,
            env={**command.environment, **listens, _RUN: run},
            pass_fds=() if command.listens is None else (command.listens,),
            start_new_session=True,
            bufsize=0,
        )
    finally:
        os.close(descriptor)
    stat = stat_of(started.pid)
    since = stat.started if stat else 0
    known = {"pid": started.pid, "started": since, "boot": boot(), "run": run}
    try:
        record(known)
        if started.stdin is not None:
            started.stdin.write(child.GO)
            started.stdin.close()
    except BaseException:
        started.kill()
        started.wait()
        if started.stdin is not None:
            started.stdin.close()
        raise
    return Process(started.pid, since, boot(), started)


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """What programs need of the daemon's own variables, and nothing of its secrets."""
    return {
        name: value for name, value in environ.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }


def headrace_words() -> tuple[str, ...]:
    """What runs this very Headrace."""
    script = Path(sys.executable).with_name("headrace")
    if script.is_file():
        return (str(script),)
    return (sys.executable, "-P", "-c", "from headrace.cli.main import main; main()")
