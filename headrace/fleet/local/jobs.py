# SPDX-License-Identifier: Apache-2.0
"""One Job: a process that runs once, to its end. The benchmark controller creates it.

Its folder is created first and removed last: `job.json` is its record, `process.json` identifies the process, `exit` has its
exit code, `state.json` its state, `log` its output. The next daemon continues from there, also if the process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from headrace.core.errors import FailedPrecondition, ResourceExhausted
from headrace.core.files import read_json, write_json
from headrace.fleet.local.container_command import CommandContext, ContainerStartError, build_command
from headrace.fleet.local.pod_status import UNSCHEDULABLE, load_state, terminated_state, update_state
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import System
from headrace.fleet.local.volumes import volume_mounts
from headrace.fleet.status.conditions import format_time, parse_time
from headrace.platforms import process_stubs
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_list, get_mapping, get_str, name_of
from headrace.platforms.log_files import last_lines, truncate_log
from headrace.platforms.processes import Command, headrace_command, inherited_environment

log = logging.getLogger("headrace.fleet")

_GRACE_SECONDS = 10.0
_TAIL_LINES, _TAIL_BYTES = 20, 2048
_RESULTS_OPTION = "--output"


@dataclass
class JobState:
    """The state of a Job, stored in its folder."""

    unschedulable: str = ""
    """Why it cannot be scheduled."""
    reason: str = ""
    """Kubernetes' reason why it does not run, while it does not."""
    message: str = ""
    started_at: str = ""
    """When it was started; "" while it does not run."""
    last: dict[str, Any] = field(default_factory=dict)
    """How it ended: Kubernetes' `terminated`."""
    results: str = ""
    """Where it writes its results, as a path of this machine."""
    late: bool = False
    """Whether it was stopped because it took too long."""


class JobInterface(Protocol):
    """The interface of the kubelet that a Job uses."""

    @property
    def system(self) -> System:
        """The operating system."""

    def find(self, namespace: str, kind: str, name: str) -> Document | None:
        """Return a ConfigMap or a Secret."""

    def hosts(self, namespace: str) -> Mapping[str, str]:
        """Return the addresses of Services, by host name."""

    def check_fits(self, uid: str, pod: Document) -> None:
        """Check that it fits beside the pods. Raises ResourceExhausted."""


class Job:
    """A Job and the task that runs it. Used from the loop's thread only."""

    def __init__(
        self, folder: Path, record: Document, settings: LocalSettings, node: JobInterface, changed: Callable[[], None]
    ) -> None:
        self.folder = folder
        self.job = get_mapping(record, "job")
        self.state = load_state(folder, JobState())
        self.removing = False
        """Whether its removal has started."""
        self._pod = get_mapping(record, "pod")
        self._settings = settings
        self._node = node
        self._now = node.system.now
        self._changed = changed
        self._process = node.system.find_process(read_json(folder / "process.json"))
        self._retry_requested = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if self._process is not None and not self.state.started_at:
            self._update(started_at=format_time(self._now()))
        elif self._process is None and not self.has_ended and (self.state.started_at or self._exit_code() is not None):
            self._record_end()

    @property
    def has_ended(self) -> bool:
        """Whether it has run to its end, successfully or not."""
        return bool(self.state.last)

    def to_document(self) -> Document:
        """Return the Job with its status, as Kubernetes reports it."""
        state, last = self.state, self.state.last
        status: dict[str, Any] = {"startTime": state.started_at} if state.started_at else {"active": 1}
        if last:
            succeeded = last["exitCode"] == 0
            condition = {"type": "Complete" if succeeded else "Failed", "status": "True"}
            if state.late:
                condition |= {"reason": "DeadlineExceeded", "message": str(last.get("message", ""))}
            status = {"conditions": [{**condition, "lastTransitionTime": last["finishedAt"]}]}
            status |= {"startTime": last["startedAt"]} if last["startedAt"] else {}
            status |= {"completionTime": last["finishedAt"]} if succeeded else {}
        return {**self.job, "status": status}

    def pods(self) -> list[Document]:
        """Return its pod with its status."""
        state, (container,) = self.state, get_list(self._pod, "spec", "containers")
        if state.unschedulable:
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": UNSCHEDULABLE,
                "message": state.unschedulable,
            }
            return [{**self._pod, "status": {"phase": "Pending", "conditions": [condition]}}]
        if state.last:
            phase, container_state = "Failed" if state.last["exitCode"] else "Succeeded", {"terminated": state.last}
        elif state.started_at:
            phase, container_state = "Running", {"running": {"startedAt": state.started_at}}
        else:
            phase, container_state = (
                "Pending",
                {"waiting": {"reason": state.reason or "ContainerCreating", "message": state.message}},
            )
        status = {
            "name": get_str(container, "name"),
            "image": get_str(container, "image"),
            "restartCount": 0,
            "state": container_state,
        }
        return [{**self._pod, "status": {"phase": phase, "containerStatuses": [status]}}]

    def logs(self, tail: int) -> str:
        """Return the last lines of its log."""
        return last_lines(self.folder / "log", tail, 2 * self._settings.log_bytes)

    def start(self) -> None:
        """Start the task that runs it, or watches it."""
        if not self.has_ended and self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def retry(self) -> None:
        """Retry its start, if it waits."""
        self._retry_requested.set()

    def rotate_log(self) -> None:
        """Drop the beginning of a long log."""
        with contextlib.suppress(OSError):
            truncate_log(self.folder / "log", self._settings.log_bytes)

    async def remove(self) -> None:
        """Stop it and remove everything but its results."""
        await self._cancel_task()
        if self._process is not None:
            await self._process.stop(_GRACE_SECONDS)
        await asyncio.to_thread(shutil.rmtree, self.folder, True)

    async def detach(self) -> None:
        """Leave it running when the daemon ends."""
        await self._cancel_task()
        if self._process is not None:
            self._process.detach()

    # The task

    async def _run(self) -> None:
        while self._process is None and not self._start():
            self._retry_requested.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.retry_seconds):
                    await self._retry_requested.wait()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(self._seconds_left()):
                await self._process.wait()
        except TimeoutError:
            self._update(late=True)  # first, so that the reason of its end is known
            await self._process.stop(_GRACE_SECONDS)
        await self._process.kill()
        self._process = None
        self._record_end()

    def _start(self) -> bool:
        """Start it; return whether it runs."""
        try:
            self._node.check_fits(get_str(self._pod, "metadata", "uid"), self._pod)
            command, results = self._command()
            path = self.folder / "process.json"
            self._process = self._node.system.spawn(
                command, self.folder / "log", lambda known: write_json(path, dict(known), durable=False)
            )
        except ResourceExhausted as error:
            self._update(unschedulable=error.message)
            return False
        except ContainerStartError as error:
            self._update(unschedulable="", reason=error.reason, message=error.message)
            return False
        except (OSError, FailedPrecondition) as error:
            message = error.message if isinstance(error, FailedPrecondition) else os.strerror(error.errno or 0)
            self._update(reason="CreateContainerError", message=f"{message}; its folder is {self.folder}")
            return False
        self._update(unschedulable="", reason="", message="", started_at=format_time(self._now()), results=results)
        return True

    def _command(self) -> tuple[Command, str]:
        """Return the command, and where it writes its results. Raises ContainerStartError, OSError."""
        namespace = get_str(self._pod, "metadata", "namespace")

        def find(kind: str, name: str) -> Document | None:
            return self._node.find(namespace, kind, name)

        (container,) = get_list(self._pod, "spec", "containers")
        paths = [
            (mount.mount_path, mount.host_path) for mount in volume_mounts(self._pod, container, self.folder, find, {})
        ]
        context = CommandContext(
            self._pod, self._settings.node, paths=paths, hosts=self._node.hosts(namespace), find=find
        )
        command = build_command(context)
        work = self.folder / "work"
        work.mkdir(exist_ok=True, mode=0o700)
        temporary = dict(paths).get("/tmp", str(work))  # noqa: S108  the container's
        environment = (
            inherited_environment(os.environ, "XDG_")
            | {"PYTHONUNBUFFERED": "1", "TMPDIR": temporary}
            | dict(command.environment)
        )
        stub = (sys.executable, "-I", "-S", process_stubs.__file__, "wait", str(self.folder / "exit"))
        return Command((*stub, *headrace_command(), *command.args), environment, work), _option_value(
            command.args, _RESULTS_OPTION
        )

    # Helpers

    def _seconds_left(self) -> float | None:
        """Return the seconds until its deadline; None if it has none."""
        deadline = get_int(self.job, "spec", "activeDeadlineSeconds")
        if deadline is None:
            return None
        return max(0.0, deadline - (self._now() - parse_time(self.state.started_at)).total_seconds())

    def _exit_code(self) -> int | None:
        try:
            return int((self.folder / "exit").read_text())
        except (OSError, ValueError):
            return None

    def _record_end(self) -> None:
        code = self._exit_code()
        message = last_lines(self.folder / "log", _TAIL_LINES, _TAIL_BYTES)
        if self.state.late:
            code = code or -signal.SIGTERM
            message = f"it took longer than {get_int(self.job, 'spec', 'activeDeadlineSeconds')} s and was stopped"
        elif code is None:
            message = "it was killed, or the machine was restarted: delete the benchmark and apply it again"
        last = terminated_state(code, self.state.started_at, format_time(self._now()), message if code != 0 else "")
        self._update(started_at="", last=last)

    def _update(self, **changes: Any) -> None:
        if update_state(self.state, self.folder, changes, lambda message: log.error("%s", message)):
            self._changed()

    async def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


def create_job(
    folder: Path, planned: Document, settings: LocalSettings, node: JobInterface, changed: Callable[[], None]
) -> Job:
    """Return a new Job; its record is written first. Raises FailedPrecondition."""
    namespace, now = get_str(planned, "metadata", "namespace"), format_time(node.system.now())
    job = {
        **planned,
        "metadata": {**get_mapping(planned, "metadata"), "uid": str(uuid.uuid4()), "creationTimestamp": now},
    }
    template = get_mapping(planned, "spec", "template")
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name_of(job), "uid": get_str(job, "metadata", "uid")}
    metadata = {
        "name": f"{name_of(job)[:57]}-{uuid.uuid4().hex[:5]}",
        "namespace": namespace,
        "uid": str(uuid.uuid4()),
        "labels": dict(get_mapping(template, "metadata", "labels")),
        "creationTimestamp": now,
        "ownerReferences": [{**owner, "controller": True}],
    }
    spec = _replace_claims(get_mapping(template, "spec"), settings.root / "claims" / namespace)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    record = {"job": job, "pod": pod}
    write_json(folder / "job.json", record)
    return Job(folder, record, settings, node, changed)


def load_job(folder: Path, settings: LocalSettings, node: JobInterface, changed: Callable[[], None]) -> Job | None:
    """Return the Job in a folder; None if its record is missing or invalid."""
    record = read_json(folder / "job.json")
    return Job(folder, record, settings, node, changed) if record and get_mapping(record, "job") else None


def _replace_claims(spec: Document, claims: Path) -> Document:
    """Replace volume claims by folders of the fleet; a folder that is only read must exist."""
    mounts = [mount for container in get_list(spec, "containers") for mount in get_list(container, "volumeMounts")]
    read_only = {get_str(mount, "name") for mount in mounts if mount.get("readOnly") is True}
    volumes = []
    for volume in get_list(spec, "volumes"):
        claim, name = get_str(volume, "persistentVolumeClaim", "claimName"), get_str(volume, "name")
        path_type = "" if name in read_only else "DirectoryOrCreate"
        volumes.append(
            {"name": name, "hostPath": {"path": str(claims / claim), "type": path_type}} if claim else volume
        )
    return {**spec, "volumes": volumes}


def _option_value(args: Sequence[str], option: str) -> str:
    return next((value for name, value in pairwise(args) if name == option), "")
