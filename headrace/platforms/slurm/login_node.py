# SPDX-License-Identifier: Apache-2.0
"""Run shell scripts where Slurm's tools are: on this machine, or on a login node over ssh.

Neither ssh nor Slurm's tools get the environment of this process, which may hold keys: sbatch would send it to the
controller. A script reaches its shell as standard input with its arguments quoted in it, so that no command line there shows
them, secrets included. Only `script_text` puts arguments into scripts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.core.errors import FailedPrecondition, HeadraceError, Unavailable
from headrace.core.files import FileLock
from headrace.platforms.commands import Completed, run_command
from headrace.platforms.slurm.settings import SlurmSettings

_INHERITED = (
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
_MAX_SOCKET_PATH = 85
"""The path of a Unix socket has at most 107 bytes, and ssh appends 17 more for a moment."""
_SOCKET_PATH = re.compile(r"/[A-Za-z0-9_./@+=,:-]+")


class LoginNodes:
    """The login nodes of one cluster; this machine if there are none."""

    def __init__(self, settings: SlurmSettings, state: Path, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._environ = environ
        self._host = settings.hosts[0] if len(settings.hosts) == 1 else ""
        self._master_seen = float("-inf")
        self._share_lock = asyncio.Lock()
        self._socket = self._control_path(state)

    @property
    def is_remote(self) -> bool:
        """Whether ssh is used."""
        return bool(self._settings.hosts)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that ssh and the tools get."""
        return {name: self._environ[name] for name in _INHERITED if name in self._environ}

    async def run(self, script: str, *args: str, seconds: float = 60.0) -> Completed:
        """Run a script on the cluster. Raises Unavailable or FailedPrecondition if the cluster cannot be reached."""
        host = await self.host() if self.is_remote else ""
        text = script_text(script, args, self._settings.tools)
        completed = await self._shell(host, text, seconds)
        if host and completed.code == _SSH_FAILED:
            self._master_seen = float("-inf")
            self._host = "" if len(self._settings.hosts) > 1 else host
            raise ssh_error(host, completed)
        return completed

    async def host(self) -> str:
        """Return the login node in use: the first that accepts the login."""
        if self._host:
            return self._host
        error: HeadraceError | None = None
        for host in self._settings.hosts:
            try:
                completed = await self._shell(host, script_text("exit 0", ()), 30.0)
            except Unavailable as unavailable:
                error = unavailable
                continue
            if completed.code == 0:
                self._host = host
                return host
            error = ssh_error(host, completed)
        raise error or FailedPrecondition("slurm: there is no login node: set SLURM_HOSTNAME")

    def ssh_args(self, host: str, *more: str, control: bool = False) -> list[str]:
        """Return an ssh command line that never prompts and trusts known hosts only. The host is the last argument."""
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
        args = ["ssh", "-T", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        args += ["-i", settings.key_file] if settings.key_file else []
        args += ["-p", str(settings.ssh_port)] if settings.ssh_port else []
        args += ["-l", settings.user] if settings.user else []
        return [*args, *more, "--", host]

    async def close(self) -> None:
        """Let the shared connection close when no command uses it."""
        if self._socket is not None and self._socket.exists() and self._host:
            with contextlib.suppress(HeadraceError):
                await self._run_clean([*self._control("-O", "stop", self._host)], 10.0, b"")

    async def _shell(self, host: str, text: str, seconds: float) -> Completed:
        if not host:
            return await self._run_clean(["/bin/sh", "-s"], seconds, text.encode())
        shared = await self._share(host)
        return await self._run_clean([*self.ssh_args(host, control=shared), "/bin/sh -s"], seconds, text.encode())

    async def _run_clean(self, argv: Sequence[str], seconds: float, text: bytes) -> Completed:
        variables = (f"{name}={value}" for name, value in self.environment.items())
        completed = await run_command(["env", "-i", *variables, *argv], seconds=seconds, input=text)
        if completed.code == 127 and argv[0] == "ssh":
            raise FailedPrecondition("the program 'ssh' is not installed here, or not on the PATH")
        return completed

    async def _share(self, host: str) -> bool:
        """Make sure that commands can share a connection, an ssh process of its own; return whether they can."""
        if self._socket is None:
            return False
        async with self._share_lock:
            if time.monotonic() - self._master_seen < _CHECK_SECONDS and self._socket.exists():
                return True
            self._socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                # Two processes that open one at once would leave one that no command uses, and that never ends.
                async with FileLock(self._socket.parent).hold(30.0):
                    checked = await self._run_clean(self._control("-O", "check", host), 10.0, b"")
                    if checked.code != 0:
                        self._socket.unlink(missing_ok=True)
                        if not await self._open_master(host):
                            return False
                    self._master_seen = time.monotonic()
                    return True
            except TimeoutError:
                return False

    async def _open_master(self, host: str) -> bool:
        args = [*self.ssh_args(host, control=True), "true"]
        index = args.index("ControlMaster=no")
        args[index : index + 1] = ["ControlMaster=yes", "-o", f"ControlPersist={_PERSIST_SECONDS}"]
        # Not with `run_command`: the shared connection stays, and would keep the pipes open.
        process = await asyncio.create_subprocess_exec(
            *args,
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

    def _control(self, *args: str) -> list[str]:
        *more, host = args
        return self.ssh_args(host, *more, control=True)

    def _control_path(self, state: Path) -> Path | None:
        """Return the socket of the shared connection; None if it is disabled, or its path is too long."""
        settings = self._settings
        if not self.is_remote or not settings.multiplex:
            return None
        name = repr((settings.hosts, settings.user, settings.ssh_port, settings.key_file, settings.known_hosts))
        path = state / "ssh" / hashlib.sha256(name.encode()).hexdigest()[:12]
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH or not _SOCKET_PATH.fullmatch(str(path)):
            return None
        return path


def cluster_location(settings: SlurmSettings) -> str:
    """Return the place of a driver: the cluster, the user and the folder."""
    hosts = ",".join(settings.hosts) or socket.gethostname()
    return f"slurm:{hosts}:{settings.user}:{settings.folder}"


def ssh_error(host: str, completed: Completed) -> HeadraceError:
    """Return the error for a failure of ssh itself."""
    if "Host key verification failed" in completed.err or "host key is known" in completed.err:
        return FailedPrecondition(
            f"the host key of {host} is not known, or is not the known one: check it, and connect once by hand"
        )
    if "Permission denied" in completed.err:
        return FailedPrecondition(f"{host} refuses the login: check SLURM_USER and SSH_KEY_PATH, or the ssh agent")
    if "Could not resolve hostname" in completed.err:
        return FailedPrecondition(f"there is no host {host}: check SLURM_HOSTNAME")
    return Unavailable(f"{host} cannot be reached by ssh: {completed.error_line}")


EXISTS = 10
NO_FOLDER = 11
REFUSED = 12
NO_ROOM = 13
NO_ANSWER = 14

FOLDER = """
case $1 in "~/"*) printf '%s/%s\\n' "${HOME%/}" "${1#"~/"}" ;; *) printf '%s\\n' "$1" ;; esac
"""
"""FOLDER: print its absolute path."""

START = f"""
base=$1 job=$2 meta=$3 variables=$4 script=$5
shift 5
umask 077
withdraw() {{ cd / && rm -rf -- "${{base:?}}/${{job:?}}"; exit "$1"; }}
mkdir -p -- "$base" 2>/dev/null
if ! mkdir -- "$base/$job" 2>/dev/null; then
  [ -d "$base/$job" ] && exit {EXISTS}
  exit {NO_FOLDER}
fi
cd -- "$base/$job" || exit {NO_FOLDER}
{{ printf '%s' "$meta" >meta && printf '%s' "$variables" >env && printf '%s' "$script" >script; }} || withdraw {NO_ROOM}
queued=$(squeue -h --user="$(id -un)" --name="$job" -o %i) || withdraw {NO_ANSWER}
[ -z "$queued" ] || withdraw {EXISTS}
# An sbatch that finds the queue full tries again for minutes.
if ! output=$(timeout 20 sbatch "$@" script 2>&1 >number.new); then
  printf '%s\\n' "$output" >&2
  scancel --user="$(id -un)" --name="$job" 2>/dev/null
  withdraw {REFUSED}
fi
mv -f -- number.new number
cat number
"""
"""FOLDER JOB META VARIABLES SCRIPT and sbatch's arguments: submit the job and print its number."""

LIST = f"""
base=$1 only=$2
cd -- "$base" 2>/dev/null || base=
[ -z "$base" ] || for job in ${{only:-*-*-*-*-*}}; do
  [ -d "$job" ] || continue
  number=- env=- meta=
  [ ! -s "$job/number" ] || read -r number <"$job/number"
  [ ! -e "$job/env" ] || env=env
  [ ! -s "$job/meta" ] || read -r meta <"$job/meta"
  printf 'folder %s %s %s %s\\n' "$job" "$number" "$env" "$meta"
done
squeue -h --user="$(id -un)" --states=all ${{only:+--name="$only"}} -o 'job %i|%T|%N|%j|%r' || exit {NO_ANSWER}
# After the queue: a script leaves its code before Slurm takes note of its end.
[ -z "$base" ] || for job in ${{only:-*-*-*-*-*}}; do
  [ ! -s "$job/end" ] || {{ read -r code <"$job/end" && printf 'end %s %s\\n' "$job" "$code"; }}
done
exit 0
"""
"""FOLDER JOB-or-nothing: print what `status.parse_listing` parses."""

ACCOUNTED = """
sacct -X -n -P -j "$1" -o State,ExitCode 2>/dev/null
exit 0
"""
"""NUMBER: print "STATE|CODE:SIGNAL", or nothing if Slurm has no accounting."""

NODE = f"""
scontrol show node -o "$1" || exit {NO_ANSWER}
"""

TERMINATE = """
scancel --quiet --user="$(id -un)" --name="$1" --state=PENDING
scancel --quiet --user="$(id -un)" --name="$1" --state=RUNNING --signal=TERM
exit 0
"""
"""JOB: cancel it if it is pending, send SIGTERM to its processes if it runs."""

KILL = """
for state in PENDING SUSPENDED; do scancel --quiet --user="$(id -un)" --name="$1" --state="$state"; done
# The step, and not the job: that one's processes would be asked to end once more, and be given the site's KillWait.
scancel --quiet --signal=KILL "$2.0"
exit 0
"""
"""JOB NUMBER: kill its processes at once."""

CANCEL = """
scancel --quiet --user="$(id -un)" --name="$1"
exit 0
"""
"""JOB: cancel it, with Slurm's own grace period."""

REMOVE = """
for try in 1 2 3 4 5; do
  rm -rf -- "${1:?}/${2:?}" 2>/dev/null
  [ -e "$1/$2" ] || exit 0
  sleep 0.2
done
exit 1
"""
"""FOLDER JOB: remove the job's folder."""

REMOVE_VARIABLES = """
rm -f -- "${1:?}/${2:?}/env"
"""
"""FOLDER JOB: remove the variables of a job that was cancelled before it read them."""

LOG = """
[ -f "$1/$2/log" ] || exit 0
tail -n "$3" -- "$1/$2/log" | tail -c 4194304
"""
"""FOLDER JOB LINES: print the last lines of the job's log."""

CHECK = """
for tool in sbatch squeue scancel scontrol sacct srun apptainer; do
  command -v "$tool" >/dev/null 2>&1 && printf 'tool %s\\n' "$tool"
done
srun --help 2>/dev/null | grep -q -e --container-image && echo 'tool pyxis'
[ -s "$HOME/.config/enroot/.credentials" ] && echo 'tool credentials'
(umask 077 && mkdir -p -- "$1") 2>/dev/null && [ -w "$1" ] && echo folder
sinfo -h -o 'partition %R|%a|%l' 2>/dev/null && echo sinfo
exit 0
"""
"""FOLDER: print what `status.parse_checks` parses."""


def script_text(script: str, args: Sequence[str], tools: str = "") -> str:
    """Return a script with its arguments. A script that is cut off anywhere is incomplete, and does nothing."""
    path = f"PATH={shlex.quote(tools)}:$PATH\n" if tools else ""
    return f"{{\n{path}main() {{\n{script.strip()}\n}}\nmain {shlex.join(args)} </dev/null\nexit\n}}\n"
