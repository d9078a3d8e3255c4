# SPDX-License-Identifier: Apache-2.0
"""One pod: placement, its containers in their order, deletion. The kubelet runs a task for each pod.

Its folder is created first and removed last: `pod.json` is its record, `state.json` its state, `containers` has a folder for
each container. The next daemon reads them and continues without a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from headrace.core.errors import FailedPrecondition, NotFound, ResourceExhausted
from headrace.core.files import read_json, write_json
from headrace.fleet.local.container import Container
from headrace.fleet.local.container_command import CommandContext, build_command
from headrace.fleet.local.container_runtime import (
    ContainerRuntime,
    ContainerSpec,
    VolumeMount,
    resource_limits,
    thread_environment,
)
from headrace.fleet.local.pod_status import (
    PodState,
    containers_with_roles,
    is_pod_ready,
    load_state,
    pod_document,
    update_state,
)
from headrace.fleet.local.scheduler import Placement, gpu_environment
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import System
from headrace.fleet.local.volumes import shared_memory, volume_mounts
from headrace.fleet.planning.context import digest_of
from headrace.fleet.planning.pod_templates import main_container
from headrace.fleet.status.conditions import format_time
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_mapping, get_str, name_of
from headrace.platforms.processes import inherited_environment

log = logging.getLogger("headrace.fleet")

_GRACE_SECONDS = 30
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class PodRecord:
    """The content of `pod.json`; its fields are the file format."""

    uid: str
    document: Document
    """Metadata and spec."""
    service: tuple[str, str]
    """Namespace and name of its InferenceService."""
    owner: tuple[str, str]
    """Kind and name of its workload."""
    unit: str
    """The replica of the workload: the pod itself, or the group that it belongs to."""
    hash: str
    """Hash of the pod template."""
    serves: bool = True
    index: int = 0
    """Its index in the group."""
    variables: Mapping[str, str] = field(default_factory=dict)
    placement: Placement | None = None
    deleting: str = ""
    """When its deletion started; "" if it is not being deleted."""
    spare: bool = False
    """Whether enough other replicas serve while it starts for the first time: it replaces one of them."""

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> PodRecord:
        """Return the record in a file's content. Raises KeyError, TypeError, ValueError."""
        placed = content.get("placement")
        placement = None
        if placed:
            ports = {int(container_port): int(port) for container_port, port in placed["ports"].items()}
            placement = Placement(ports, tuple(placed["gpus"]), float(placed["memory"]))
        pairs = {name: (str(content[name][0]), str(content[name][1])) for name in ("service", "owner")}
        return cls(**{**content, **pairs, "placement": placement})


@dataclass(frozen=True)
class StartTimes:
    """When the processes of a pod started, and when it became ready, since the epoch; 0 if before this daemon."""

    started: float = 0.0
    found: float = 0.0
    """When the daemon found it to be ready. The field names are part of the daemon's API."""


class NodeInterface(Protocol):
    """The interface of the kubelet that a pod uses."""

    @property
    def system(self) -> System:
        """The operating system."""

    def find(self, namespace: str, kind: str, name: str) -> Document | None:
        """Return a ConfigMap or a Secret."""

    def place(self, pod: Pod) -> Placement:
        """Assign ports and GPUs to it. Raises ResourceExhausted."""

    def release(self, pod: Pod) -> None:
        """Release its ports and GPUs."""

    def models(self, pod: Pod) -> Mapping[str, str]:
        """Return the mount paths of its models, and their local folders. Raises ResourceExhausted while one is missing."""

    def hosts(self, namespace: str) -> Mapping[str, str]:
        """Return the addresses of Services, by host name."""

    def leader_ports(self, pod: Pod) -> Mapping[int, int]:
        """Return the ports of the leader of a worker's group."""

    def pod_changed(self, pod: Pod) -> None:
        """Handle a changed state of a pod."""

    def container_ended(self, pod: Pod, container: Container) -> None:
        """Handle the end of a container: the other containers of its group are restarted."""

    def record_event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """Record an event of a pod."""

    def wait_drained(self, pod: Pod) -> Awaitable[None]:
        """Wait until no router sends requests to it."""


class Pod:
    """A pod and its containers. Used from the loop's thread only."""

    def __init__(
        self, folder: Path, record: PodRecord, settings: LocalSettings, node: NodeInterface, runtime: ContainerRuntime
    ) -> None:
        self.folder = folder
        self.record = record
        self.state = load_state(folder, PodState())
        self._settings = settings
        self._node = node
        self._runs_images = runtime.runs_images
        self._deleted = asyncio.Event()
        self._retry_requested = asyncio.Event()
        containers = containers_with_roles(get_mapping(record.document, "spec"))
        folder_names = _folder_names([document for document, _ in containers])
        self.containers = [
            Container(folder / "containers" / name, document, role, self, settings, runtime)
            for name, (document, role) in zip(folder_names, containers, strict=True)
        ]

    @property
    def name(self) -> str:
        """The name of the pod."""
        return name_of(self.record.document)

    @property
    def is_ready(self) -> bool:
        """Whether it may get requests."""
        return not self.record.deleting and is_pod_ready([container.status for container in self.containers])

    @property
    def sessions(self) -> frozenset[int]:
        """The sessions of its processes."""
        sessions = (container.running.session for container in self.containers if container.running is not None)
        return frozenset(session for session in sessions if session is not None)

    def to_document(self) -> Document:
        """Return the pod with its status, as Kubernetes reports it."""
        statuses = [container.status for container in self.containers]
        return pod_document(self.record.document, self.state, statuses, self._settings.node, self.record.deleting)

    def port(self, container_port: int) -> int | None:
        """Return the port of this machine for a container port."""
        placement = self.record.placement
        return placement.ports.get(container_port, container_port) if placement is not None else None

    def container(self, name: str = "") -> Container:
        """Return a container by name, by default the main one. Raises NotFound."""
        container_name = name or get_str(main_container(get_mapping(self.record.document, "spec")), "name")
        for container in self.containers:
            if container.name == container_name:
                return container
        names = ", ".join(container.name for container in self.containers)
        raise NotFound(f"{self.name} has no container {container_name}; it has {names}")

    def delete(self) -> None:
        """Delete it soon; the deletion is stored first."""
        if not self.record.deleting:
            record = replace(self.record, deleting=format_time(self.system.now()))
            with contextlib.suppress(FailedPrecondition):  # a full disk must not prevent the deletion
                self._write(record)
            self.record = record
        self._deleted.set()

    def restart(self) -> None:
        """Restart all its containers: another pod of its group has ended."""
        for container in self.containers:
            container.restart()

    def retry(self, *, reset_backoff: bool = False) -> None:
        """Retry what the pod waits for. `reset_backoff`: also containers in a crash loop, whose cause may be fixed."""
        self._retry_requested.set()
        for container in self.containers:
            container.retry(reset_backoff=reset_backoff)

    def rotate_logs(self) -> None:
        """Drop the beginning of long logs."""
        for container in self.containers:
            container.rotate_log()

    def detach(self) -> None:
        """Leave it running when the daemon ends."""
        for container in self.containers:
            container.detach()

    # The task

    async def run(self) -> None:
        """Run it until it is deleted and removed."""
        working = asyncio.ensure_future(self._run_containers())
        deleted = asyncio.ensure_future(self._deleted.wait())
        try:
            if not self.record.deleting:
                await asyncio.wait({working, deleted}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()  # a pod that has ended stays visible until it is deleted
                    await deleted
        finally:
            working.cancel()
            deleted.cancel()
            await asyncio.gather(working, deleted, return_exceptions=True)
        await self._remove()

    async def _run_containers(self) -> None:
        """Place it, run its init containers one after the other, then the others, until all have ended for good."""
        while not self._place():
            await self._wait_retry(self._settings.retry_seconds)
        async with asyncio.TaskGroup() as group:
            sidecars: list[asyncio.Task[None]] = []
            for container in self.containers:
                if container.role == "sidecar":
                    sidecars.append(group.create_task(container.run()))
                    await container.wait_started()
                elif container.role == "init":
                    await container.run()
                    if not container.state.succeeded:
                        break
            else:
                # Tasks of the group: if one fails by a bug, the others must not continue unwatched.
                tasks = [
                    group.create_task(container.run()) for container in self.containers if container.role == "main"
                ]
                await asyncio.gather(*tasks)
            for task in sidecars:
                task.cancel()
        await asyncio.gather(*(container.stop() for container in self.containers if container.role == "sidecar"))
        self.changed()

    def _place(self) -> bool:
        """Assign its resources; return whether they, and its models, are available."""
        try:
            if not any(container.running for container in self.containers):
                self._node.models(self)
            if self.record.placement is None:
                record = replace(self.record, placement=self._node.place(self))
                try:
                    self._write(record)
                except FailedPrecondition:
                    self._node.release(self)
                    raise
                self.record = record
        except (ResourceExhausted, FailedPrecondition) as error:
            if self.state.unschedulable != error.message:
                self.record_event("Warning", "FailedScheduling", error.message)
            self._update(unschedulable=error.message, placed=False)
            return False
        self._update(unschedulable="", placed=True)
        return True

    async def _remove(self) -> None:
        """Drain it, stop its containers in reverse start order, and remove its folder."""
        await self._node.wait_drained(self)
        await asyncio.gather(*(container.stop() for container in self.containers if container.role != "sidecar"))
        for container in reversed(self.containers):
            await container.stop()
        await asyncio.to_thread(shutil.rmtree, self.folder, True)
        self._node.release(self)
        self._node.pod_changed(self)

    # For its containers: see `container.PodInterface`

    @property
    def system(self) -> System:
        """The operating system."""
        return self._node.system

    @property
    def ports(self) -> Mapping[int, int]:
        """Container ports, and the ports of this machine in their place."""
        return self.record.placement.ports if self.record.placement is not None else {}

    @property
    def grace_seconds(self) -> float:
        """Seconds between SIGTERM and SIGKILL."""
        seconds = get_int(self.record.document, "spec", "terminationGracePeriodSeconds")
        return float(_GRACE_SECONDS if seconds is None else seconds)

    @property
    def restart_policy(self) -> str:
        """Always, OnFailure or Never."""
        return get_str(self.record.document, "spec", "restartPolicy") or "Always"

    def container_spec(self, container: Document, folder: Path) -> ContainerSpec:
        """Return what to run for a container. Blocking: writes its volumes. Computed for each start, as inputs may change.

        Raises ContainerStartError, OSError, and ResourceExhausted while it must wait.
        """
        placement = self.record.placement or Placement()
        mounts = self._volume_mounts(container)
        command = build_command(self._context(mounts), container)
        limits = resource_limits(container, self._settings.max_processes)
        inherited = {} if self._runs_images else inherited_environment(os.environ, "XDG_")
        threads = thread_environment(limits, len(os.sched_getaffinity(0)), {**inherited, **command.environment})
        work_folder = folder / "work"
        work_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return ContainerSpec(
            self.record.uid,
            get_str(container, "name"),
            folder,
            replace(command, environment={**threads, **command.environment}),
            work_folder,
            get_str(container, "image"),
            mounts,
            limits,
            placement.gpus,
            shared_memory(self.record.document, container),
            container,
            self.record.spare,
        )

    def command_context(self, container: Document) -> CommandContext:
        """Return the context of a probe's command. Raises as `container_spec`."""
        return self._context(self._volume_mounts(container))

    def changed(self) -> None:
        """Report a changed state."""
        self._node.pod_changed(self)

    def container_ended(self, container: Container) -> None:
        """Report the end of a container."""
        self._node.container_ended(self, container)

    def record_event(self, kind: str, reason: str, message: str) -> None:
        """Record an event."""
        self._node.record_event(self, kind, reason, message)

    # Helpers

    def _volume_mounts(self, container: Document) -> list[VolumeMount]:
        models = self._node.models(self)
        return volume_mounts(
            self.record.document, container, self.folder, self._find, models, other_users=self._runs_images
        )

    def _context(self, mounts: Sequence[VolumeMount]) -> CommandContext:
        record, placement = self.record, self.record.placement or Placement()
        paths = [
            (mount.mount_path, mount.host_path) for mount in mounts if mount.host_path != mount.mount_path.rstrip("/")
        ]
        return CommandContext(
            record.document,
            self._settings.node,
            placement.ports,
            self._node.leader_ports(self),
            () if self._runs_images else paths,
            self._node.hosts(record.service[0]),
            {**record.variables, **({} if self._runs_images else gpu_environment(placement))},
            self._find,
            self._runs_images,
        )

    def _find(self, kind: str, name: str) -> Document | None:
        return self._node.find(get_str(self.record.document, "metadata", "namespace"), kind, name)

    def _update(self, **changes: Any) -> None:
        def on_write_error(message: str) -> None:
            self.record_event("Warning", "DiskPressure", message)

        if update_state(self.state, self.folder, changes, on_write_error):
            self.changed()

    def _write(self, record: PodRecord) -> None:
        write_json(self.folder / "pod.json", asdict(record), durable=False)

    async def _wait_retry(self, seconds: float) -> None:
        self._retry_requested.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._retry_requested.wait()


def create_pod(
    folder: Path, record: PodRecord, settings: LocalSettings, node: NodeInterface, runtime: ContainerRuntime
) -> Pod:
    """Return a new pod; its record is written first. Raises FailedPrecondition."""
    write_json(folder / "pod.json", asdict(record), durable=False)
    return Pod(folder, record, settings, node, runtime)


def load_pod(folder: Path, settings: LocalSettings, node: NodeInterface, runtime: ContainerRuntime) -> Pod | None:
    """Return the pod in a folder; None if its record is missing or invalid."""
    content = read_json(folder / "pod.json")
    if content is None:
        return None
    try:
        return Pod(folder, PodRecord.parse(content), settings, node, runtime)
    except (KeyError, TypeError, ValueError, AttributeError):
        log.error("Ignoring %s: it is not a valid record of a pod", folder / "pod.json")
        return None


def _folder_names(containers: Sequence[Document]) -> list[str]:
    """Return a unique folder name for each container: its own name if that is valid and unique."""
    names: list[str] = []
    for number, container in enumerate(containers):
        name = get_str(container, "name")
        names.append(name if _NAME.fullmatch(name) and name not in names else f"{number}-{digest_of(name)}")
    return names
