# SPDX-License-Identifier: Apache-2.0
"""The kubelet: all pods of this machine, created, adopted from an earlier daemon, and deleted. Each pod is a task."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from headrace.core.errors import FailedPrecondition, ResourceExhausted
from headrace.core.files import list_folders
from headrace.fleet.local.container import Container
from headrace.fleet.local.container_runtime import ContainerRuntime
from headrace.fleet.local.events import Events
from headrace.fleet.local.models import READY, Models
from headrace.fleet.local.object_store import DocumentStore, Service
from headrace.fleet.local.pod import Pod, PodRecord, StartTimes, create_pod, load_pod
from headrace.fleet.local.scheduler import Placement, Scheduler
from headrace.fleet.local.service_proxy import Routers
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import System
from headrace.fleet.names import SERVICE
from headrace.fleet.planning.context import live_key
from headrace.platforms.kubernetes_client.objects import Document, get_mapping, get_str, kind_of

log = logging.getLogger("headrace.fleet")

_ROTATE_SECONDS = 1.0


class Kubelet:
    """All pods; implements `pod.NodeInterface` and `jobs.JobInterface`."""

    def __init__(
        self,
        settings: LocalSettings,
        store: DocumentStore,
        scheduler: Scheduler,
        routers: Routers,
        events: Events,
        runtime: ContainerRuntime,
        system: System,
    ) -> None:
        self.system = system
        self._settings = settings
        self._folder = settings.root / "pods"
        self._store = store
        self._scheduler = scheduler
        self._routers = routers
        self._events = events
        self._runtime = runtime
        self._models = Models(settings, self._secret, self._update_model_status)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rotating: asyncio.Task[None] | None = None
        self._closing = False
        self.pods: dict[str, Pod] = {}
        self.start_times: dict[str, StartTimes] = {}
        """Of pods that run, by uid."""
        self.on_change: Callable[[Service], None] = lambda _: None
        self.objects: Callable[[Service], Mapping[str, Document]] = lambda _: {}
        """The live objects of a service, by `live_key`."""

    def load(self) -> None:
        """Adopt the pods of an earlier daemon."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in list_folders(self._folder):
            pod = load_pod(folder, self._settings, self, self._runtime)
            if pod is None:
                if not (folder / "pod.json").exists():
                    shutil.rmtree(folder, ignore_errors=True)  # its creation was interrupted
                continue
            for container in pod.containers:
                if container.running is not None:
                    log.info("Adopted %s: %s, %s", pod.name, container.name, container.running.label)
            self._run_pod(pod)
        self._rotating = asyncio.ensure_future(self._rotate_forever())

    def create(self, record: PodRecord) -> None:
        """Create a pod. Raises FailedPrecondition if its record cannot be written."""
        try:
            self._run_pod(create_pod(self._folder / record.uid, record, self._settings, self, self._runtime))
        except FailedPrecondition:
            shutil.rmtree(self._folder / record.uid, ignore_errors=True)
            raise

    def pods_of(self, service: Service) -> list[Pod]:
        """Return the pods of a service, also those that are being deleted, oldest first."""
        pods = [pod for pod in self.pods.values() if pod.record.service == service]
        return sorted(pods, key=lambda pod: (get_str(pod.record.document, "metadata", "creationTimestamp"), pod.name))

    def rotate_logs(self) -> None:
        """Drop the beginning of long logs."""
        for pod in self.pods.values():
            pod.rotate_logs()

    def progress(self, model: Document) -> list[Any]:
        """Return the download progress of a model."""
        return list(self._models.progress(model))

    def retry(self, *, reset_backoff: bool = False) -> None:
        """Have pods retry what they wait for. `reset_backoff`: also those in a crash loop."""
        for pod in self.pods.values():
            pod.retry(reset_backoff=reset_backoff)

    async def delete_all(self) -> None:
        """Delete all pods, and wait until they are gone."""
        for pod in list(self.pods.values()):
            pod.delete()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        """Stop the tasks; pods keep running."""
        self._closing = True
        if self._rotating is not None:
            self._rotating.cancel()
            await asyncio.gather(self._rotating, return_exceptions=True)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for pod in self.pods.values():
            pod.detach()
        await self._models.close()

    async def _rotate_forever(self) -> None:
        """Rotate logs every second, so that a flooding container cannot fill the disk."""
        while True:
            await asyncio.sleep(_ROTATE_SECONDS)
            self.rotate_logs()

    def _run_pod(self, pod: Pod) -> None:
        uid = pod.record.uid
        self.pods[uid] = pod
        task = asyncio.ensure_future(pod.run())
        self._tasks[uid] = task
        task.add_done_callback(lambda done: self._pod_ended(pod, done))

    def _pod_ended(self, pod: Pod, done: asyncio.Task[None]) -> None:
        if self._closing or done.cancelled():
            return
        if done.exception() is not None:
            # A bug in Headrace. The pod stays as it is, and its task is restarted after a delay.
            log.error("The task of pod %s failed", pod.name, exc_info=done.exception())
            loop = asyncio.get_running_loop()
            loop.call_later(self._settings.retry_seconds, lambda: None if self._closing else self._run_pod(pod))
            return
        uid = pod.record.uid
        self.pods.pop(uid, None)
        self.start_times.pop(uid, None)
        self._tasks.pop(uid, None)
        self.retry()
        self.on_change(pod.record.service)

    # For pods and jobs

    def find(self, namespace: str, kind: str, name: str) -> Document | None:
        """Return a ConfigMap or Secret that a user applied, or that a service was planned with."""
        document = self._store.get(kind, namespace, name)
        if document is not None:
            return _decode_secret(document) if kind == "Secret" else document
        for service in {pod.record.service for pod in self.pods.values() if pod.record.service[0] == namespace}:
            live = self.objects(service).get(live_key(kind, name))
            if live is not None:
                return live
        return None

    def place(self, pod: Pod) -> Placement:
        """Assign ports and GPUs to a pod."""
        placements = [other.record.placement for other in self.pods.values() if other is not pod]
        placed = [placement for placement in placements if placement is not None]
        record = pod.record
        return self._scheduler.place(record.uid, record.document, placed, [*self.pods, record.uid], record.serves)

    def check_fits(self, uid: str, pod: Document) -> None:
        """Check that a job fits beside the pods; it reserves nothing. Raises ResourceExhausted."""
        placements = [other.record.placement for other in self.pods.values()]
        placed = [placement for placement in placements if placement is not None]
        self._scheduler.place(uid, pod, placed, [*self.pods, uid], False)

    def release(self, pod: Pod) -> None:
        """Release the ports of a pod."""
        try:
            self._scheduler.release(pod.record.uid)
        except OSError as error:
            log.warning("Cannot release a port: %s", error)

    def models(self, pod: Pod) -> Mapping[str, str]:
        """Return the local folder of the model of a pod's service. Raises ResourceExhausted while it is missing."""
        namespace, service = pod.record.service
        document = self._store.get(SERVICE, namespace, service)
        reference = get_mapping(document, "status", "model") or get_mapping(document, "spec", "model")
        name = get_str(reference, "name")
        if not name:
            return {}
        model = self._store.get("BaseModel", namespace, name) or self._store.get("ClusterBaseModel", "", name)
        if model is None:
            raise ResourceExhausted(f"there is no model {name}: apply it")
        state = self._models.use(model)
        if state.state != READY:
            raise ResourceExhausted(state.problem or f"model {name} is being downloaded to this machine")
        return {get_str(model, "spec", "storage", "path"): state.path}

    def hosts(self, namespace: str) -> Mapping[str, str]:
        """Return the addresses of Services, by host name."""
        return self._routers.hosts()

    def leader_ports(self, pod: Pod) -> Mapping[int, int]:
        """Return the ports of the leader of a worker's group."""
        record = pod.record
        if not record.index:
            return {}
        for other_pod in self.pods.values():
            other = other_pod.record
            if (other.service, other.owner, other.unit, other.index) == (record.service, record.owner, record.unit, 0):
                if other.placement is None:
                    raise ResourceExhausted("it waits for its leader")
                return other.placement.ports
        return {}

    def pod_changed(self, pod: Pod) -> None:
        """Record when a pod started and became ready, and report the change."""
        uid, now = pod.record.uid, self.system.clock.wall()
        times = self.start_times.get(uid, StartTimes())
        if all(container.running is None for container in pod.containers):
            self.start_times.pop(uid, None)
        else:
            ready = times.found or (now if pod.is_ready else 0.0)
            self.start_times[uid] = StartTimes(times.started or now, ready)
        self.on_change(pod.record.service)

    def container_ended(self, pod: Pod, container: Container) -> None:
        """Restart the other containers of a LeaderWorkerSet group."""
        record = pod.record
        if record.owner[0] != "LeaderWorkerSet":
            return
        for other_container in pod.containers:
            if other_container is not container:
                other_container.restart()
        for other_pod in self.pods.values():
            other = other_pod.record
            if other_pod is not pod and (other.service, other.owner, other.unit) == (
                record.service,
                record.owner,
                record.unit,
            ):
                other_pod.restart()

    def record_event(self, pod: Pod, kind: str, reason: str, message: str) -> None:
        """Record an event of a pod."""
        self._events.record(pod.to_document(), kind, reason, message)

    async def wait_drained(self, pod: Pod) -> None:
        """Wait until no router sends requests to a pod."""
        placement = pod.record.placement
        for port in placement.ports.values() if placement is not None else ():
            await self._routers.wait_drained(pod.record.service, port)

    def _secret(self, namespace: str, name: str) -> Document | None:
        return self._store.get("Secret", namespace, name)

    def _update_model_status(self, model: Document, status: Mapping[str, Any]) -> None:
        live = self._store.get(
            kind_of(model), get_str(model, "metadata", "namespace"), get_str(model, "metadata", "name")
        )
        if live is not None:
            self._store.update_status({**live, "status": {**get_mapping(live, "status"), **status}})
        self.retry()


def _decode_secret(secret: Document) -> Document:
    """Return a Secret with decoded values."""
    data: dict[str, str] = {}
    for name, value in get_mapping(secret, "data").items():
        try:
            data[name] = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, TypeError, ValueError):
            continue
    return {**secret, "data": data}
