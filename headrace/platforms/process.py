# SPDX-License-Identifier: Apache-2.0
"""The driver `process`: a service is a process of this machine, in a session of its own, that outlives the gateway.

Each has a folder, `<root>/jobs/<job id>`: `launch.json` says which process it is (pid, start time, boot, port),
`secrets.json` has its secret words, `log` what it said; its temporary files lie there too. The folder is made first and
removed last, so that whatever is killed in between, the next look finds it. Blocking work is done in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.errors import AlreadyExists, FailedPrecondition, InvalidArgument, Unavailable
from headrace.platforms.checking import check_spec
from headrace.platforms.child import GO
from headrace.platforms.contract import FILE, PORT, Check, Handle, LaunchSpec, Observed
from headrace.platforms.folders import META, is_id, read_meta, write_whole
from headrace.platforms.gpus import DEVICES, VARIABLE, alone, choose, gpus_here
from headrace.platforms.identity import Stat, boot, command_of, session_members, stat_of
from headrace.platforms.logs import keep_end, last_lines
from headrace.platforms.ports import Ports

log = logging.getLogger("headrace.launch")

T = TypeVar("T")
_POLL_SECONDS = 0.02
_KILL_SECONDS = 10.0
_LEAST_FREE_BYTES = 100 * 1024 * 1024
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
    "OPENBLAS_",
    "TOKENIZERS_",
    "HF_HUB_",
    "SSL_CERT_",
    "PYTHON",
    "XDG_CACHE_",
)


class ProcessDriver:
    """See `contract.Driver`. Several gateways of one machine may share a root."""

    name = "process"

    def __init__(
        self,
        root: Path,
        *,
        host: str = "127.0.0.1",
        ports: tuple[int, int] = (20_000, 31_999),
        log_bytes: int = 2 * 1024 * 1024,
        environ: Mapping[str, str] | None = None,
        devices: Path = DEVICES,
    ) -> None:
        self._root = root.absolute()
        self._jobs = self._root / "jobs"
        self.place = f"process:{socket.gethostname()}:{self._root}"
        self._host = host
        self._ports = Ports(self._root / "ports", host, *ports)
        self._log_bytes = log_bytes
        self._environ = os.environ if environ is None else environ
        self._devices = devices
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        """Those that this very process started: their ends have to be taken note of, or they stay as zombies."""
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="headrace-launch")

    # The contract

    async def preflight(self) -> list[Check]:
        """See `contract.Driver.preflight`."""
        return await self._in_thread(self._preflight)

    async def start(self, spec: LaunchSpec) -> Handle:
        """See `contract.Driver.start`. Whoever is cancelled waits for its end, so that a stop finds it whole."""
        starting = asyncio.ensure_future(self._in_thread(lambda: self._start(spec)))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            if not starting.cancelled():
                starting.exception()
            raise

    async def status(self, handle: Handle) -> Observed:
        """See `contract.Driver.status`."""
        return await self._in_thread(lambda: self._status(handle.job_id))

    async def logs(self, handle: Handle, tail: int) -> str:
        """See `contract.Driver.logs`."""
        path = self._folder(handle.job_id) / "log"
        return await self._in_thread(lambda: last_lines(path, tail, self._log_bytes))

    async def endpoint(self, handle: Handle) -> str | None:
        """See `contract.Driver.endpoint`."""
        return await self._in_thread(lambda: self._endpoint(handle.job_id))

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """See `contract.Driver.stop`."""
        job_id = handle.job_id
        folder = self._folder(job_id)
        meta = await self._in_thread(lambda: read_meta(folder))
        if meta is not None:
            await self._end(job_id, meta, grace_seconds)
        await self._in_thread(lambda: self._forget(job_id, folder))

    async def found(self) -> dict[str, Observed]:
        """See `contract.Driver.found`."""
        return await self._in_thread(self._found)

    async def close(self) -> None:
        """See `contract.Driver.close`."""
        self._threads.shutdown(wait=False)
        for child in self._children.values():
            # It runs on, and whoever adopts it reaps it: without this Python would warn that it was left.
            child.returncode = child.poll() or 0
        self._children.clear()

    # In threads

    def _preflight(self) -> list[Check]:
        checks: list[Check] = []
        try:
            self._make_room()
            writable = os.access(self._jobs, os.W_OK)
        except OSError:
            writable = False
        checks.append(Check("folder", writable, f"{self._root} " + ("is writable" if writable else "is not writable")))
        has_proc = stat_of(os.getpid()) is not None
        checks.append(Check("/proc", has_proc, "is readable" if has_proc else "cannot be read: mount procfs"))
        if writable:
            free = shutil.disk_usage(self._jobs).free
            text = f"{free >> 20} MiB are free in {self._root}; {_LEAST_FREE_BYTES >> 20} are needed"
            checks.append(Check("disk", free >= _LEAST_FREE_BYTES, text))
        return checks

    def _make_room(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._jobs.mkdir(exist_ok=True, mode=0o700)

    def _start(self, spec: LaunchSpec) -> Handle:
        check_spec(spec)
        folder = self._folder(spec.job_id)
        try:
            self._make_room()
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise AlreadyExists(f"a service of job {spec.job_id} was started here before") from None
        except OSError as error:
            raise FailedPrecondition(
                f"{folder} cannot be made: {error.strerror}; make room or change its rights"
            ) from None
        try:
            port = self._ports.claim(spec.job_id, lambda job_id: (self._jobs / job_id).is_dir(), spec.host_port)
            return self._spawn_with_gpus(spec, folder, port)
        except BaseException as error:
            self._forget(spec.job_id, folder)
            if isinstance(error, OSError):
                log.warning("job %s cannot be started: %s", spec.job_id, error)
                raise FailedPrecondition(
                    f"the service cannot be started on this machine ({error.strerror}); the server's log has more"
                ) from None
            raise

    def _spawn_with_gpus(self, spec: LaunchSpec, folder: Path, port: int) -> Handle:
        """Choose its GPUs and start it, so that its record says whose they are before anybody else chooses."""
        here = gpus_here(self._environ, self._devices) if spec.gpus and VARIABLE not in spec.environment else ()
        if not here:
            if spec.gpus and VARIABLE not in spec.environment:
                log.info("job %s: no GPU on this machine; it runs without the %d asked for", spec.job_id, spec.gpus)
            return self._spawn(spec, folder, port, ())
        with alone(self._root):
            return self._spawn(spec, folder, port, choose(here, self._taken_gpus(), spec.gpus))

    def _taken_gpus(self) -> set[str]:
        metas = (read_meta(self._jobs / name) for name in os.listdir(self._jobs) if is_id(name))
        return {gpu for meta in metas if meta is not None and self._living(meta) for gpu in meta.get("gpus", ())}

    def _spawn(self, spec: LaunchSpec, folder: Path, port: int, gpus: tuple[str, ...]) -> Handle:
        write_whole(folder / "secrets.json", dict(spec.secrets))
        (folder / "tmp").mkdir(mode=0o700)
        (folder / "files").mkdir(mode=0o700)
        filled = {PORT: str(port)}
        for name, content in spec.files.items():
            filled[FILE % name] = str(folder / "files" / f"{name}.json")
            write_whole(Path(filled[FILE % name]), content)
        words = [filled.get(word, word) for word in spec.argv]
        program = [sys.executable, "-P", "-m", "headrace.platforms.child"]
        argv = [*program, spec.job_id, str(folder / "secrets.json"), spec.target]
        descriptor = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            child = subprocess.Popen(  # noqa: S603  # our own module; no shell, and users' words are in the secrets
                [*argv, *words],
                stdin=subprocess.PIPE,
                stdout=descriptor,
                stderr=descriptor,
                cwd=folder / "tmp",
                env=self._environment(spec, folder) | ({VARIABLE: ",".join(gpus)} if gpus else {}),
                start_new_session=True,
                bufsize=0,
            )
        finally:
            os.close(descriptor)
        self._children[spec.job_id] = child
        stat = stat_of(child.pid)
        meta = {
            "job_id": spec.job_id,
            "pid": child.pid,
            "started": stat.started if stat else 0,
            "boot": boot(),
            "port": port,
            "host": self._host,
            "gpus": list(gpus),
            "began": time.time(),
        }
        try:
            write_whole(folder / META, meta)
            _open_gate(child)
        except BaseException:
            child.kill()
            child.wait()
            self._children.pop(spec.job_id, None)
            raise
        return Handle(spec.job_id, self.name, {"pid": child.pid, "port": port, "host_port": port})

    def _environment(self, spec: LaunchSpec, folder: Path) -> dict[str, str]:
        """Little of the gateway's own: its keys and its database are no business of a service."""
        kept = {
            name: value
            for name, value in self._environ.items()
            if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
        }
        return {
            **kept,
            "PYTHONUNBUFFERED": "1",
            **spec.environment,
            **spec.secret_environment,
            "TMPDIR": str(folder / "tmp"),
        }

    def _status(self, job_id: str) -> Observed:
        folder = self._folder(job_id)
        meta = read_meta(folder)
        if meta is None:
            # A folder without a process: its start was cut short, and the gate let nothing through.
            return (
                Observed("ended", word="Failed", reason="it was never started") if folder.is_dir() else Observed("gone")
            )
        name = f"{socket.gethostname()}-{meta['pid']}"
        if self._living(meta) is not None:
            with contextlib.suppress(OSError):
                keep_end(folder / "log", self._log_bytes)
            return Observed("running", name, "Running")
        child = self._children.get(job_id)
        code = _exit_code(child) if child is not None else None
        return Observed("ended", name, "Succeeded" if code == 0 else "Failed", code, _told(code))

    def _endpoint(self, job_id: str) -> str | None:
        meta = read_meta(self._folder(job_id))
        if meta is None or self._living(meta) is None:
            return None
        host = f"[{meta['host']}]" if ":" in meta["host"] else meta["host"]
        return f"http://{host}:{meta['port']}"

    def _found(self) -> dict[str, Observed]:
        for job_id, child in list(self._children.items()):
            # Another gateway may have stopped it; its end is still ours to take note of.
            if child.poll() is not None and not self._folder(job_id).exists():
                self._children.pop(job_id, None)
        try:
            names = os.listdir(self._jobs)
        except FileNotFoundError:
            return {}
        seen = {name: self._status(name) for name in names if is_id(name)}
        return {name: observed for name, observed in seen.items() if observed.phase != "gone"}

    async def _end(self, job_id: str, meta: Mapping[str, Any], grace_seconds: float) -> None:
        """SIGTERM to the service, and SIGKILL to all of its session when it is gone or the grace is over."""
        if await self._in_thread(lambda: self._signal(meta, signal.SIGTERM)):
            await self._until_dead(job_id, meta, grace_seconds)
        give_up = time.monotonic() + _KILL_SECONDS
        while await self._in_thread(lambda: self._kill_session(meta)):
            if time.monotonic() > give_up:
                raise Unavailable(f"processes of job {job_id} do not end although they were killed; try again later")
            await asyncio.sleep(_POLL_SECONDS)
        child = self._children.pop(job_id, None)
        if child is not None:
            await self._in_thread(child.wait)

    async def _until_dead(self, job_id: str, meta: Mapping[str, Any], seconds: float) -> None:
        limit = time.monotonic() + seconds
        pause = _POLL_SECONDS
        while time.monotonic() < limit:
            child = self._children.get(job_id)
            if child is not None:
                child.poll()
            if self._living(meta) is None:
                return
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.5)

    def _living(self, meta: Mapping[str, Any]) -> Stat | None:
        """The very process that was started, if it lives."""
        if meta["boot"] != boot():
            return None
        stat = stat_of(meta["pid"])
        if stat is None or not stat.lives or stat.started != meta["started"]:
            return None
        words = command_of(meta["pid"])
        # None at all: the kernel is about to give it its own, as it has just been started.
        return stat if not words or meta["job_id"] in words else None

    def _signal(self, meta: Mapping[str, Any], number: signal.Signals) -> bool:
        if self._living(meta) is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(meta["pid"], number)
        return True

    def _kill_session(self, meta: Mapping[str, Any]) -> bool:
        """Kill whoever is left of a service; True if there was anybody."""
        if meta["boot"] != boot():
            return False
        leader = stat_of(meta["pid"])
        if leader is not None and leader.started != meta["started"]:
            return False  # the number is another's: a session of that number is, too
        members = session_members(meta["pid"])
        for member in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member.pid, signal.SIGKILL)
        return bool(members)

    def _forget(self, job_id: str, folder: Path) -> None:
        # The meta first: a folder that is half removed has to read as one whose service is dead.
        (folder / META).unlink(missing_ok=True)
        self._ports.release(job_id)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            raise Unavailable(f"{folder} cannot be removed; look at its rights and remove it")

    def _folder(self, job_id: str) -> Path:
        if not is_id(job_id):
            raise InvalidArgument("a service's job id is a UUID, written in lower case")
        return self._jobs / job_id

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _open_gate(child: subprocess.Popen[bytes]) -> None:
    if child.stdin is None:
        raise RuntimeError("a service is started with a pipe")
    with child.stdin as gate, contextlib.suppress(BrokenPipeError):
        gate.write(GO)


def _exit_code(child: subprocess.Popen[bytes]) -> int | None:
    """Of one that is dead; the kernel may need a moment more until it tells."""
    try:
        return child.wait(1.0)
    except subprocess.TimeoutExpired:
        return None


def _told(code: int | None) -> str:
    if code is None:
        return "the process has ended"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process has ended with code {code}"
