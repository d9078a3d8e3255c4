# SPDX-License-Identifier: Apache-2.0
"""Where Slurm's tools are: this machine, or a login node over ssh. Runs the programs of `programs` there.

Called by `driver` and `tunnels`. Neither ssh nor Slurm's tools are given this process's environment, which has keys in it
that are none of their business: sbatch would hand it to the controller as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.core.errors import FailedPrecondition, HeadraceError, Unavailable
from headrace.platforms.commands import Completed, run_command
from headrace.platforms.slurm import programs
from headrace.platforms.slurm.settings import SlurmSettings

_KEPT = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "SLURM_CONF",
    "SSH_AUTH_SOCK",
    "KRB5CCNAME",
)
_SSH_FAILED = 255
_PERSIST_SECONDS = 60
_CHECK_SECONDS = 20.0
_MOST_SOCKET_PATH = 85
"""A Unix socket's path has at most 107 bytes, and ssh puts 17 more behind it for a moment."""
_PLAIN = re.compile(r"/[A-Za-z0-9_./@+=,:-]+")


class Hosts:
    """One cluster's ways in."""

    def __init__(self, settings: SlurmSettings, state: Path, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._environ = environ
        self._host = settings.hosts[0] if len(settings.hosts) == 1 else ""
        self._master_seen = float("-inf")
        self._alone = asyncio.Lock()
        self._socket = self._control_path(state)

    @property
    def is_remote(self) -> bool:
        """Whether ssh is used."""
        return bool(self._settings.hosts)

    @property
    def environment(self) -> dict[str, str]:
        """What the tools may see."""
        return {name: self._environ[name] for name in _KEPT if name in self._environ}

    async def run(self, program: str, *words: str, seconds: float = 60.0) -> Completed:
        """Run a program of `programs` on the cluster. Raises Unavailable or FailedPrecondition if it cannot be reached."""
        host = await self.host() if self.is_remote else ""
        text = programs.text(program, words, self._settings.tools)
        completed = await self._shell(host, text, seconds)
        if host and completed.code == _SSH_FAILED:
            self._master_seen = float("-inf")
            self._host = "" if len(self._settings.hosts) > 1 else host
            raise ssh_error(host, completed)
        return completed

    async def host(self) -> str:
        """The login node: the first that lets us in."""
        if self._host:
            return self._host
        last: HeadraceError | None = None
        for host in self._settings.hosts:
            try:
                completed = await self._shell(host, programs.text("exit 0", ()), 30.0)
            except Unavailable as error:
                last = error
                continue
            if completed.code == 0:
                self._host = host
                return host
            last = ssh_error(host, completed)
        raise last or FailedPrecondition("slurm: there is no login node: give SLURM_HOSTNAME")

    def ssh_words(self, host: str, *more: str, control: bool = False) -> list[str]:
        """An ssh that asks nobody anything, and trusts no host that it does not know. The host is the last word."""
        settings = self._settings
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "ConnectTimeout": "10",
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "3",
            "ForwardAgent": "no",
            "ForwardX11": "no",
            "LogLevel": "ERROR",
            "ControlMaster": "no",
            "ControlPath": str(self._socket) if control and self._socket else "none",
        }
        if settings.known_hosts:
            options["UserKnownHostsFile"] = settings.known_hosts
        if settings.key_file:
            options["IdentitiesOnly"] = "yes"
        words = ["ssh", "-T", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        words += ["-i", settings.key_file] if settings.key_file else []
        words += ["-p", str(settings.ssh_port)] if settings.ssh_port else []
        words += ["-l", settings.user] if settings.user else []
        return [*words, *more, "--", host]

    async def close(self) -> None:
        """Let the shared connection end once nobody uses it."""
        if self._socket is not None and self._socket.exists() and self._host:
            with contextlib.suppress(HeadraceError):
                await self._clean([*self._control("-O", "stop", self._host)], 10.0, b"")

    async def _shell(self, host: str, text: str, seconds: float) -> Completed:
        if not host:
            return await self._clean(["/bin/sh", "-s"], seconds, text.encode())
        shared = await self._share(host)
        return await self._clean([*self.ssh_words(host, control=shared), "/bin/sh -s"], seconds, text.encode())

    async def _clean(self, argv: Sequence[str], seconds: float, text: bytes) -> Completed:
        kept = (f"{name}={value}" for name, value in self.environment.items())
        completed = await run_command(["env", "-i", *kept, *argv], seconds=seconds, input=text)
        if completed.code == 127 and argv[0] == "ssh":
            raise FailedPrecondition("the program 'ssh' is not installed here, or not on the PATH")
        return completed

    async def _share(self, host: str) -> bool:
        """Whether a connection is there for commands to share; it is a process of its own, for none may end with another."""
        if self._socket is None:
            return False
        async with self._alone:
            if time.monotonic() - self._master_seen < _CHECK_SECONDS and self._socket.exists():
                return True
            self._socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self._socket.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Two that make one at once would leave one that serves nobody, and never ends.
                if not await _locked(lock, 30.0):
                    return False
                checked = await self._clean(self._control("-O", "check", host), 10.0, b"")
                if checked.code != 0:
                    self._socket.unlink(missing_ok=True)
                    if not await self._make_master(host):
                        return False
                self._master_seen = time.monotonic()
                return True
            finally:
                os.close(lock)

    async def _make_master(self, host: str) -> bool:
        words = [*self.ssh_words(host, control=True), "true"]
        at = words.index("ControlMaster=no")
        words[at : at + 1] = ["ControlMaster=yes", "-o", f"ControlPersist={_PERSIST_SECONDS}"]
        # Not by `run_command`: the shared connection stays, and would keep its pipes open.
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=self.environment,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(20.0):
                return await process.wait() == 0
        except TimeoutError:
            return False
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _control(self, *words: str) -> list[str]:
        *more, host = words
        return self.ssh_words(host, *more, control=True)

    def _control_path(self, state: Path) -> Path | None:
        """Where the shared connection listens; None where there is to be none, or no room for its name."""
        settings = self._settings
        if not self.is_remote or not settings.multiplex:
            return None
        name = repr((settings.hosts, settings.user, settings.ssh_port, settings.key_file, settings.known_hosts))
        path = state / "ssh" / hashlib.sha256(name.encode()).hexdigest()[:12]
        if len(os.fsencode(path)) > _MOST_SOCKET_PATH or not _PLAIN.fullmatch(str(path)):
            return None
        return path


async def _locked(descriptor: int, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            await asyncio.sleep(0.02)
    return False


def place_of(settings: SlurmSettings) -> str:
    """Which cluster, as whom, and which folder."""
    where = ",".join(settings.hosts) or socket.gethostname()
    return f"slurm:{where}:{settings.user}:{settings.folder}"


def ssh_error(host: str, completed: Completed) -> HeadraceError:
    """What to do when ssh itself failed."""
    if "Host key verification failed" in completed.err or "host key is known" in completed.err:
        return FailedPrecondition(
            f"the host key of {host} is not known, or is not the known one: check it, connect once by hand"
        )
    if "Permission denied" in completed.err:
        return FailedPrecondition(f"{host} does not let us in: check SLURM_USER and SSH_KEY_PATH, or the ssh agent")
    if "Could not resolve hostname" in completed.err:
        return FailedPrecondition(f"there is no host {host}: check SLURM_HOSTNAME")
    return Unavailable(f"{host} cannot be reached by ssh: {completed.told}")
