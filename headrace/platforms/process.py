# SPDX-License-Identifier: Apache-2.0
"""The driver `process`: a service is a process of this machine, in a session of its own, that outlives the gateway.

Each service has a folder `<root>/jobs/<job id>`: `launch.json` identifies the process (pid, start time, boot, port),
`secrets.json` has its secret arguments, `log` its output; its temporary files are there too. The folder is created first and
removed last: a service whose start or stop was interrupted is found by its folder. Blocking work runs in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.errors import AlreadyExists, FailedPrecondition, Unavailable
from headrace.core.files import write_json
from headrace.platforms.commands import run_to_end
from headrace.platforms.contract import (
    FILE,
    PORT,
    Check,
    Handle,
    LaunchSpec,
    PlatformStatus,
    check_job_id,
    check_spec,
    is_job_id,
)
from headrace.platforms.log_files import last_lines, truncate_log
from headrace.platforms.node_resources import (
    DEVICES,
    GPU_VARIABLE,
    PortAllocator,
    choose_gpus,
    gpu_lock,
    visible_gpus,
)
from headrace.platforms.processes import (
    Command,
    Process,
    command_line,
    inherited_environment,
    read_record,
    read_stat,
    spawn,
)

log = logging.getLogger("headrace.launch")

T = TypeVar("T")
RECORD = "launch.json"
_POLL_SECONDS = 0.02
_KILL_SECONDS = 10.0
_MIN_FREE_BYTES = 100 * 1024 * 1024
_INHERITED_PREFIXES = ("OPENBLAS_", "TOKENIZERS_", "HF_HUB_", "PYTHON", "XDG_CACHE_")


class ProcessDriver:
    """Implements `contract.Driver`. Several gateways of one machine may share a root."""

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
        self._ports = PortAllocator(self._root / "ports", host, *ports)
        self._log_bytes = log_bytes
        self._environ = os.environ if environ is None else environ
        self._devices = devices
        self._children: dict[str, Process] = {}
        """Child processes, which this process has to reap."""
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="headrace-launch")

    # The contract

    async def preflight(self) -> list[Check]:
        """Check the folder, /proc and the free disk space."""
        return await self._in_thread(self._preflight)

    async def start(self, spec: LaunchSpec) -> Handle:
        """Start a service. A cancelled caller waits for the end of the start, so that a stop finds all of it."""
        return await run_to_end(self._in_thread(lambda: self._start(spec)))

    async def status(self, handle: Handle) -> PlatformStatus:
        """Return the status of the process."""
        return await self._in_thread(lambda: self._status(handle.job_id))

    async def logs(self, handle: Handle, tail: int) -> str:
        """Return the last lines of the log file."""
        path = self._folder(handle.job_id) / "log"
        return await self._in_thread(lambda: last_lines(path, tail, self._log_bytes))

    async def endpoint(self, handle: Handle) -> str | None:
        """Return the URL of a process that runs."""
        return await self._in_thread(lambda: self._endpoint(handle.job_id))

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """Stop the whole session of the process and remove its folder."""
        job_id = handle.job_id
        folder = self._folder(job_id)
        record = await self._in_thread(lambda: read_record(folder / RECORD))
        if record is not None:
            await self._stop_session(job_id, record, grace_seconds)
        await self._in_thread(lambda: self._remove(job_id, folder))

    async def list_services(self) -> dict[str, PlatformStatus]:
        """Return the status of every job that has a folder."""
        return await self._in_thread(self._list_services)

    async def close(self) -> None:
        """Stop the threads; services keep running."""
        self._threads.shutdown(wait=False)
        for child in self._children.values():
            child.detach()
        self._children.clear()

    # In threads

    def _preflight(self) -> list[Check]:
        checks: list[Check] = []
        try:
            self._make_folders()
            writable = os.access(self._jobs, os.W_OK)
        except OSError:
            writable = False
        checks.append(Check("folder", writable, f"{self._root} " + ("is writable" if writable else "is not writable")))
        has_proc = read_stat(os.getpid()) is not None
        checks.append(Check("/proc", has_proc, "is readable" if has_proc else "cannot be read: mount procfs"))
        if writable:
            free = shutil.disk_usage(self._jobs).free
            text = f"{free >> 20} MiB are free in {self._root}; {_MIN_FREE_BYTES >> 20} are needed"
            checks.append(Check("disk", free >= _MIN_FREE_BYTES, text))
        return checks

    def _make_folders(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._jobs.mkdir(exist_ok=True, mode=0o700)

    def _start(self, spec: LaunchSpec) -> Handle:
        check_spec(spec)
        folder = self._folder(spec.job_id)
        try:
            self._make_folders()
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise AlreadyExists(f"a service of job {spec.job_id} was started here before") from None
        except OSError as error:
            raise FailedPrecondition(
                f"{folder} cannot be created: {error.strerror}; make room or change its permissions"
            ) from None
        try:
            port = self._ports.claim(spec.job_id, lambda job_id: (self._jobs / job_id).is_dir(), spec.host_port)
            return self._spawn_with_gpus(spec, folder, port)
        except BaseException as error:
            self._remove(spec.job_id, folder)
            if isinstance(error, OSError):
                log.warning("Cannot start job %s: %s", spec.job_id, error)
                raise FailedPrecondition(
                    f"the service cannot be started on this machine ({error.strerror}); the server's log has more"
                ) from None
            raise

    def _spawn_with_gpus(self, spec: LaunchSpec, folder: Path, port: int) -> Handle:
        """Choose its GPUs and start it; its record says which GPUs it has before another start chooses."""
        visible = (
            visible_gpus(self._environ, self._devices) if spec.gpus and GPU_VARIABLE not in spec.environment else ()
        )
        if not visible:
            if spec.gpus and GPU_VARIABLE not in spec.environment:
                log.info("Job %s: no GPU on this machine; it runs without the %d requested", spec.job_id, spec.gpus)
            return self._spawn(spec, folder, port, ())
        with gpu_lock(self._root):
            return self._spawn(spec, folder, port, choose_gpus(visible, self._taken_gpus(), spec.gpus))

    def _taken_gpus(self) -> set[str]:
        records = (read_record(self._jobs / name / RECORD) for name in os.listdir(self._jobs) if is_job_id(name))
        return {
            gpu
            for record in records
            if record is not None and self._is_alive(self._process(record), record)
            for gpu in record.get("gpus", ())
        }

    def _spawn(self, spec: LaunchSpec, folder: Path, port: int, gpus: tuple[str, ...]) -> Handle:
        write_json(folder / "secrets.json", dict(spec.secrets))
        (folder / "tmp").mkdir(mode=0o700)
        (folder / "files").mkdir(mode=0o700)
        values = {PORT: str(port)}
        for name, content in spec.files.items():
            path = folder / "files" / f"{name}.json"
            values[FILE % name] = str(path)
            write_json(path, content)
        stub = (sys.executable, "-P", "-m", "headrace.platforms.process_stubs", "call")
        args = (spec.job_id, str(folder / "secrets.json"), spec.target, *(values.get(arg, arg) for arg in spec.argv))
        environment = self._environment(spec, folder) | ({GPU_VARIABLE: ",".join(gpus)} if gpus else {})

        def record(identity: Mapping[str, Any]) -> None:
            content = {
                "job_id": spec.job_id,
                "pid": identity["pid"],
                "started": identity["started"],
                "boot": identity["boot"],
                "port": port,
                "host": self._host,
                "gpus": list(gpus),
                "began": time.time(),
            }
            write_json(folder / RECORD, content)

        process = spawn(Command((*stub, *args), environment, folder / "tmp"), folder / "log", record)
        self._children[spec.job_id] = process
        return Handle(spec.job_id, self.name, {"pid": process.pid, "port": port, "host_port": port})

    def _environment(self, spec: LaunchSpec, folder: Path) -> dict[str, str]:
        """Return the variables of a service: few of the gateway's own, which may hold keys and the database's URL."""
        return {
            **inherited_environment(self._environ, *_INHERITED_PREFIXES),
            "PYTHONUNBUFFERED": "1",
            **spec.environment,
            **spec.secret_environment,
            "TMPDIR": str(folder / "tmp"),
        }

    def _status(self, job_id: str) -> PlatformStatus:
        folder = self._folder(job_id)
        record = read_record(folder / RECORD)
        if record is None:
            if not folder.is_dir():
                return PlatformStatus("gone")
            # A folder without a process: its start was interrupted, and the stub exited at the gate.
            return PlatformStatus("ended", pod_phase="Failed", reason="it was never started")
        process = self._process(record)
        name = f"{socket.gethostname()}-{process.pid}"
        if self._is_alive(process, record):
            with contextlib.suppress(OSError):
                truncate_log(folder / "log", self._log_bytes)
            return PlatformStatus("running", name, "Running")
        code = process.exit_code(1.0)  # the kernel may report the end a moment later
        return PlatformStatus("ended", name, "Succeeded" if code == 0 else "Failed", code, _exit_reason(code))

    def _endpoint(self, job_id: str) -> str | None:
        record = read_record(self._folder(job_id) / RECORD)
        if record is None or not self._is_alive(self._process(record), record):
            return None
        host = f"[{record['host']}]" if ":" in record["host"] else record["host"]
        return f"http://{host}:{record['port']}"

    def _list_services(self) -> dict[str, PlatformStatus]:
        for job_id, child in list(self._children.items()):
            # Another gateway may have stopped it; this process still has to reap it.
            if child.exit_code() is not None and not self._folder(job_id).exists():
                self._children.pop(job_id, None)
        try:
            names = os.listdir(self._jobs)
        except FileNotFoundError:
            return {}
        statuses = {name: self._status(name) for name in names if is_job_id(name)}
        return {name: status for name, status in statuses.items() if status.phase != "gone"}

    async def _stop_session(self, job_id: str, record: Mapping[str, Any], grace_seconds: float) -> None:
        """Send SIGTERM to the process, and SIGKILL to its session when it has ended or the grace period is over."""
        process = self._process(record)
        if await self._in_thread(lambda: self._is_alive(process, record)):
            process.signal(signal.SIGTERM)
            await self._wait_ended(process, record, grace_seconds)
        limit = time.monotonic() + _KILL_SECONDS
        while await self._in_thread(process.kill_session):
            if time.monotonic() > limit:
                raise Unavailable(f"processes of job {job_id} do not end although they were killed; try again later")
            await asyncio.sleep(_POLL_SECONDS)
        child = self._children.pop(job_id, None)
        if child is not None:
            await self._in_thread(lambda: child.exit_code(_KILL_SECONDS))

    async def _wait_ended(self, process: Process, record: Mapping[str, Any], seconds: float) -> None:
        limit = time.monotonic() + seconds
        pause = _POLL_SECONDS
        while time.monotonic() < limit and self._is_alive(process, record):
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 0.5)

    def _process(self, record: Mapping[str, Any]) -> Process:
        """Return the process of a record; the child object if this process started it."""
        child = self._children.get(record["job_id"])
        if child is not None and child.pid == record["pid"]:
            return child
        return Process(record["pid"], record["started"], record["boot"])

    def _is_alive(self, process: Process, record: Mapping[str, Any]) -> bool:
        """Whether the process that was started still runs: its arguments contain the job id."""
        if not process.is_alive:
            return False
        args = command_line(process.pid)
        # No arguments at all: the kernel is in the middle of an exec.
        return not args or record["job_id"] in args

    def _remove(self, job_id: str, folder: Path) -> None:
        # The record first: a folder that is removed in part must read as that of a dead service.
        (folder / RECORD).unlink(missing_ok=True)
        self._ports.release(job_id)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            raise Unavailable(f"{folder} cannot be removed; check its permissions and remove it")

    def _folder(self, job_id: str) -> Path:
        return self._jobs / check_job_id(job_id)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "the process has ended"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process has ended with code {code}"
