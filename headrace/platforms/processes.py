# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive their parent: their identity in Linux's /proc, and how they are started, watched and stopped.

The drivers `process`, `slurm` and `brev`, `fleet.local` and `jobs` use it. A pid alone does not identify a process: the
kernel reuses it. The pid, the start time and the boot of the machine together do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace.core.errors import Unavailable
from headrace.platforms import process_stubs

log = logging.getLogger("headrace.launch")

_ZOMBIE = "ZX"
_RUN_VARIABLE = "HEADRACE_RUN"
"""Set for each started process, and so for its children: identifies them after their parent has ended."""
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.02
_INHERITED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HF_HOME", "HF_ENDPOINT"}
)
_INHERITED_PREFIXES = (
    "LC_",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "CUDA_",
    "NVIDIA_",
    "OMP_",
    "MKL_",
    "SSL_CERT_",
)


# Identity


@dataclass(frozen=True, slots=True)
class Stat:
    """One process in /proc."""

    pid: int
    state: str
    session: int
    started: int
    """In clock ticks since the boot of the machine."""

    @property
    def is_alive(self) -> bool:
        """Whether it runs; a zombie does not count."""
        return self.state not in _ZOMBIE


def read_stat(pid: int) -> Stat | None:
    """Return the process of this pid; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may contain anything, parentheses and spaces too.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(pid, fields[0].decode(), int(fields[3]), int(fields[19]))


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; an empty list if it is gone, or in the middle of an exec."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(arg) for arg in raw.split(b"\0")[:-1]]


def process_environment(pid: int) -> list[bytes]:
    """Return the initial `NAME=value` pairs of a process; none if it is gone, or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def session_members(session: int) -> list[Stat]:
    """Return all living processes of a session. Reads every process of the machine."""
    stats = (read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in stats if stat is not None and stat.session == session and stat.is_alive]


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of this boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def process_name(extra: str = "") -> str:
    """Return a name of this process that is unique among machines: host, boot, pid, start time."""
    pid = os.getpid()
    stat = read_stat(pid)
    return f"{socket.gethostname()}/{boot_id()}/{pid}/{stat.started if stat else 0}/{extra}"


def is_dead(name: str) -> bool:
    """Whether the process of a `process_name` has ended; False if this machine cannot know."""
    parts = name.split("/")
    if len(parts) < 4 or parts[0] != socket.gethostname() or not parts[2].isdigit():
        return False
    if parts[1] != boot_id():
        return True
    stat = read_stat(int(parts[2]))
    return stat is None or not stat.is_alive or str(stat.started) != parts[3]


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the recorded identity of a process; None if there is no file. Raises Unavailable if it is unreadable."""
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        log.exception("Cannot read %s", path)
        raise Unavailable(f"{path} cannot be read: check the file and the server's log") from None
    return record if isinstance(record, dict) else None


# Starting and stopping


@dataclass(frozen=True)
class Command:
    """What to run."""

    argv: tuple[str, ...]
    """The first argument is a path."""
    environment: Mapping[str, str]
    folder: Path
    """The working directory."""
    listen_descriptor: int | None = None
    """A listening socket that the program inherits, as systemd passes one; see `process_stubs`."""


class Process:
    """A process in a session of its own, which outlives its parent, and everything that it started.

    A process that an earlier parent started is watched and stopped like a child; only its exit code stays unknown.
    """

    def __init__(self, pid: int, started: int, boot: str, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._started = started
        self._boot = boot
        self._child = child
        """Set if this process is its parent, which has to reap it."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any] | None) -> Process | None:
        """Return the process of a record if it is alive. If it is not, kill what it has left behind."""
        if not record:
            return None
        try:
            process = cls(int(record["pid"]), int(record["started"]), str(record["boot"]))
        except (KeyError, TypeError, ValueError):
            return None
        if process.is_alive:
            return process
        if process._boot == boot_id():
            _kill_orphans(process.pid, str(record.get("run", "")))
        return None

    @property
    def is_alive(self) -> bool:
        """Whether this process, and not another one with its pid, runs; a zombie does not count."""
        if self._child is not None and self._child.poll() is not None:
            return False
        if self._boot != boot_id():
            return False
        stat = read_stat(self.pid)
        return stat is not None and stat.is_alive and stat.started == self._started

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, not to its children."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_session(self) -> bool:
        """Send SIGKILL to every process of the session; return whether there was any. Blocking: reads all of /proc."""
        if self._child is not None:
            self._child.poll()
        leader = read_stat(self.pid)
        if self._boot != boot_id() or (leader is not None and leader.started != self._started):
            return False  # the pid was reused: a session of that number belongs to another process, too
        members = session_members(self.pid)
        for member in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member.pid, signal.SIGKILL)
        return bool(members)

    async def wait(self) -> int | None:
        """Wait for its end. Return the exit code, negative for a signal; None if it is unknown."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return self.exit_code()
        loop = asyncio.get_running_loop()
        try:
            if self._is_unreaped:
                ended = asyncio.Event()
                loop.add_reader(descriptor, ended.set)
                try:
                    await ended.wait()
                finally:
                    loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)
        return self.exit_code()

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, wait for the grace period, then send SIGKILL to the whole session."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(grace_seconds, 0.0)):
                await self.wait()
        await self.kill()

    async def kill(self) -> None:
        """Kill the whole session, and wait until it is gone, for at most ten seconds."""
        for _ in range(int(_KILL_SECONDS / _POLL_SECONDS)):
            if not self.kill_session():
                break
            await asyncio.sleep(_POLL_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                await self.wait()

    def exit_code(self, wait_seconds: float = 0.0) -> int | None:
        """Return the exit code of a child that has ended; None if it runs or is not a child. Blocking for `wait_seconds`."""
        if self._child is None:
            return None
        if not wait_seconds:
            return self._child.poll()
        try:
            return self._child.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            return None

    def detach(self) -> None:
        """Leave it running: another process reaps it. Without this Python warns that a child was left."""
        if self._child is not None:
            self._child.returncode = self._child.poll() or 0

    @property
    def _is_unreaped(self) -> bool:
        """Whether /proc still has it. If only its first thread has ended it looks like a zombie; others may hold ports."""
        stat = read_stat(self.pid)
        return self._boot == boot_id() and stat is not None and stat.started == self._started


def spawn(command: Command, log: Path, record: Callable[[Mapping[str, Any]], None]) -> Process:
    """Start a process in a session of its own, with its output appended to `log`. Raises OSError.

    The process runs nothing of the command before `record` has stored its pid, start time, boot and run id.
    """
    run = uuid.uuid4().hex
    listener = command.listen_descriptor
    inherited = {} if listener is None else {process_stubs.LISTEN_DESCRIPTOR: str(listener)}
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        child = subprocess.Popen(  # noqa: S603  # no shell; the command is the caller's
            [sys.executable, "-I", "-S", process_stubs.__file__, "exec", *command.argv],
            stdin=subprocess.PIPE,
            stdout=descriptor,
            stderr=descriptor,
            cwd=command.folder,
            env={**command.environment, **inherited, _RUN_VARIABLE: run},
            pass_fds=() if listener is None else (listener,),
            start_new_session=True,
            bufsize=0,
        )
    finally:
        os.close(descriptor)
    stat = read_stat(child.pid)
    started = stat.started if stat else 0
    try:
        record({"pid": child.pid, "started": started, "boot": boot_id(), "run": run})
        _open_gate(child)
    except BaseException:
        child.kill()
        child.wait()
        if child.stdin is not None:
            child.stdin.close()
        raise
    return Process(child.pid, started, boot_id(), child)


def inherited_environment(environ: Mapping[str, str], *more_prefixes: str) -> dict[str, str]:
    """Return the variables that a started program may see: paths, locale, proxies, GPU settings; no secrets."""
    prefixes = (*_INHERITED_PREFIXES, *more_prefixes)
    return {name: value for name, value in environ.items() if name in _INHERITED or name.startswith(prefixes)}


def headrace_command() -> tuple[str, ...]:
    """Return the command that runs this installation of Headrace."""
    script = Path(sys.executable).with_name("headrace")
    if script.is_file():
        return (str(script),)
    return (sys.executable, "-P", "-c", "from headrace.cli.main import main; main()")


def _open_gate(child: subprocess.Popen[bytes]) -> None:
    if child.stdin is not None:
        with child.stdin as gate, contextlib.suppress(BrokenPipeError):
            gate.write(process_stubs.GO)


def _kill_orphans(session: int, run: str) -> None:
    """Kill the children of a process that ended unwatched. By their run id: the session number may have been reused."""
    mark = f"{_RUN_VARIABLE}={run}".encode()
    for member in session_members(session):
        if run and mark in process_environment(member.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member.pid, signal.SIGKILL)
