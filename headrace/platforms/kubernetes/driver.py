# SPDX-License-Identifier: Apache-2.0
"""The driver `kubernetes`: a service is a Job or a StatefulSet.

A start creates the workload without a pod, then what the pod needs, owned by the workload, and then lets the pod start: an
interrupted start is found by the workload's label, and is deleted with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import AlreadyExists, FailedPrecondition, HeadraceError, ResourceExhausted, Unavailable
from headrace.platforms.contract import Check, Handle, LaunchSpec, PlatformStatus, check_job_id
from headrace.platforms.kubernetes import manifests
from headrace.platforms.kubernetes.api_client import ClusterClient, gather_all, refusal_code
from headrace.platforms.kubernetes.settings import KubernetesSettings
from headrace.platforms.kubernetes.status import newest_pod, service_status, service_url
from headrace.platforms.kubernetes_client.objects import Document

log = logging.getLogger("headrace.launch")

_POLL_SECONDS = 0.05
_SLOWEST_POLL_SECONDS = 1.0


class KubernetesDriver:
    """Implements `contract.Driver` for one namespace and one kind of workload."""

    name = "kubernetes"

    def __init__(self, settings: KubernetesSettings | None = None) -> None:
        self._settings = settings or KubernetesSettings()
        self._cluster = ClusterClient(self._settings)
        self._kind = "Job" if self._settings.workload == "job" else "StatefulSet"
        self._version = "batch/v1" if self._settings.workload == "job" else "apps/v1"

    @property
    def place(self) -> str:
        """The cluster, the namespace and the kind of workload."""
        try:
            server = self._cluster.server
        except FailedPrecondition:
            server = "?"  # the next call reports the error
        return f"kubernetes:{server}:{self._settings.namespace}:{self._settings.workload}"

    async def preflight(self) -> list[Check]:
        """Check the kubeconfig, the permissions, the namespace and the nodes."""
        return await run_preflight(self._cluster, self._settings)

    async def start(self, spec: LaunchSpec) -> Handle:
        """Create the workload, its Service and its Secret."""
        start = secrets.token_hex(8)
        paused = manifests.workload(spec, self._settings, start, paused=True)
        await self._check_gpus(spec.gpus)
        # The API server may complete a request whose sender was cancelled: wait for the end, then undo it.
        creating = asyncio.ensure_future(self._create(spec, paused, start))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            await asyncio.wait([creating])
            if not creating.cancelled() and creating.exception() is None:
                with contextlib.suppress(HeadraceError, TimeoutError):
                    await self._delete(spec.job_id)
            raise

    async def _create(self, spec: LaunchSpec, paused: Document, start: str) -> Handle:
        """Create all objects; delete them again if a step fails."""
        created = await self._claim(spec, paused, start)
        try:
            owner = manifests.owner_of(created, self._kind, self._version)
            secret = manifests.secret(spec, self._settings, owner)
            owned = [manifests.service(spec, self._settings, owner)] + ([secret] if secret is not None else [])
            await gather_all(*(self._cluster.apply(document) for document in owned))
            await self._cluster.apply(manifests.workload(spec, self._settings, start))
        except BaseException:
            with contextlib.suppress(HeadraceError, TimeoutError):
                await asyncio.shield(self._delete(spec.job_id))
            raise
        return Handle(
            spec.job_id,
            self.name,
            {"platform_job_id": created["metadata"]["name"], "namespace": self._settings.namespace},
        )

    async def status(self, handle: Handle) -> PlatformStatus:
        """Return the status of the workload and its pod."""
        workload, pods = await self._get_workload_and_pods(handle.job_id)
        event = ""
        if workload is not None and not pods:
            event = await self._last_warning(workload)
        return service_status(workload, pods, event)

    async def logs(self, handle: Handle, tail: int) -> str:
        """Return the last lines of the pod's log."""
        check_job_id(handle.job_id)
        try:
            pod = newest_pod(await self._cluster.list("Pod", manifests.own_labels(handle.job_id)))
            if pod is None or not (pod.get("spec") or {}).get("nodeName"):
                return ""
            container = manifests.CONTAINER_NAMES[self._settings.workload]
            return await self._cluster.log(pod["metadata"]["name"], container, tail)
        except HeadraceError as error:
            if refusal_code(error) in (400, 404):  # the container is not created yet, or the pod was deleted meanwhile
                return ""
            raise

    async def endpoint(self, handle: Handle) -> str | None:
        """Return the URL of the Service."""
        check_job_id(handle.job_id)
        (workload, pods), service = await gather_all(
            self._get_workload_and_pods(handle.job_id),
            self._cluster.get("Service", manifests.service_name(handle.job_id, self._settings)),
        )
        status = service_status(workload, pods)
        if service is None or status.phase in ("ended", "gone"):
            return None
        return service_url(service, newest_pod(pods), self._settings)

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """Delete the workload, and wait until nothing of it is left."""
        job_id = check_job_id(handle.job_id)
        grace = max(1, math.ceil(grace_seconds))
        limit = time.monotonic() + grace + self._settings.delete_seconds
        pause = _POLL_SECONDS
        shortened: set[str] = set()
        await self._delete(job_id)
        while remaining := await self._remaining(job_id):
            for pod in remaining:
                # The deletion of the workload uses the pods' own grace period; the requested one may be shorter.
                if pod["kind"] == "Pod" and pod["metadata"]["uid"] not in shortened:
                    shortened.add(pod["metadata"]["uid"])
                    await self._cluster.delete("Pod", pod["metadata"]["name"], grace=grace)
            if time.monotonic() > limit:
                names_left = ", ".join(f"{document['kind']} {document['metadata']['name']}" for document in remaining)
                raise Unavailable(
                    f"{names_left} of namespace {self._settings.namespace} are not deleted; is the node alive? "
                    "`kubectl delete pod NAME --force` removes a dead node's pod"
                )
            await asyncio.sleep(pause)
            pause = min(pause * 1.3, _SLOWEST_POLL_SECONDS)

    async def list_services(self) -> dict[str, PlatformStatus]:
        """Return the status of all services, with one list of workloads and one of pods."""
        workloads, pods = await gather_all(
            self._cluster.list(self._kind, manifests.own_labels()),
            self._cluster.list("Pod", manifests.own_labels()),
        )
        pods_by_job: dict[str, list[Document]] = {}
        for pod in pods:
            pods_by_job.setdefault(manifests.job_id_of(pod), []).append(pod)
        return {
            manifests.job_id_of(workload): service_status(workload, pods_by_job.get(manifests.job_id_of(workload), []))
            for workload in workloads
        }

    async def close(self) -> None:
        """Close the connections."""
        await self._cluster.close()

    # Start

    async def _check_gpus(self, gpus: int) -> None:
        if not gpus or not self._settings.check_gpus:
            return
        try:
            largest = max((allocatable_gpus(node) for node in await self._cluster.list("Node")), default=0)
        except HeadraceError as error:
            if refusal_code(error) == 403:
                return  # without permission to list nodes the scheduler reports it
            raise
        if largest < gpus:
            raise ResourceExhausted(
                f"{gpus} GPUs are requested, and the largest node of the cluster has {largest} (allocatable {GPU}); request "
                "fewer, or set TAO_K8S_SKIP_NODE_RUNTIME_CHECK=true if nodes are created on demand"
            )

    async def _claim(self, spec: LaunchSpec, paused: Document, start: str) -> Document:
        """Create the workload; of several starts of one job only one succeeds, as their pod templates differ."""
        try:
            return await self._cluster.apply(paused)
        except HeadraceError as error:
            if refusal_code(error) != 422:
                raise
            existing = await self._cluster.get(self._kind, paused["metadata"]["name"])
            if existing is None or _start_of(existing) == start:
                raise
            state = "is still being removed" if existing["metadata"].get("deletionTimestamp") else "was started before"
            raise AlreadyExists(
                f"a service of job {spec.job_id} {state} in namespace {self._settings.namespace}"
            ) from None

    # Queries

    async def _get_workload_and_pods(self, job_id: str) -> tuple[Document | None, list[Document]]:
        check_job_id(job_id)
        workload, pods = await gather_all(
            self._cluster.get(self._kind, manifests.workload_name(job_id, self._settings)),
            self._cluster.list("Pod", manifests.own_labels(job_id)),
        )
        return workload, pods

    async def _last_warning(self, workload: Document) -> str:
        """Return the last warning of the controllers if there is no pod: a quota, a Pod Security Standard, a webhook."""
        try:
            events = await self._cluster.list("Event", uid=workload["metadata"]["uid"])
        except HeadraceError as error:
            if not refusal_code(error):
                raise
            return ""
        warnings = [event for event in events if event.get("type") == "Warning" and event.get("message")]
        last = max(warnings, key=lambda event: event.get("lastTimestamp") or "", default=None)
        return "" if last is None else f"{last.get('reason', '')}: {last['message']}"[:500]

    # Stop

    async def _delete(self, job_id: str) -> None:
        await self._cluster.delete(self._kind, manifests.workload_name(job_id, self._settings), foreground=True)

    async def _remaining(self, job_id: str) -> list[Document]:
        """Return what is left of a service; deletes objects whose workload is gone."""
        kinds = (self._kind, "Pod", "Service", "Secret")
        lists = await gather_all(*(self._cluster.list(kind, manifests.own_labels(job_id)) for kind in kinds))
        remaining: list[Document] = [
            {**document, "kind": kind} for kind, documents in zip(kinds, lists, strict=True) for document in documents
        ]
        if not lists[0]:
            for document in remaining:
                if document["kind"] != "Pod" and not document["metadata"].get("deletionTimestamp"):
                    await self._cluster.delete(document["kind"], document["metadata"]["name"])
        return remaining


def _start_of(workload: Mapping[str, Any]) -> str:
    labels = workload["spec"]["template"]["metadata"].get("labels") or {}
    return str(labels.get(manifests.START_LABEL, ""))


GPU = "nvidia.com/gpu"
_WORKLOADS = {"job": ("create", "batch", "jobs"), "statefulset": ("create", "apps", "statefulsets")}
_NEEDED = (
    ("create", "", "services"),
    ("create", "", "secrets"),
    ("list", "", "pods"),
    ("get", "", "pods/log"),
)


async def run_preflight(cluster: ClusterClient, settings: KubernetesSettings) -> list[Check]:
    """Run the checks until one makes the others impossible."""
    try:
        server = cluster.server
    except HeadraceError as error:
        return [Check("kubeconfig", passed=False, message=error.message)]
    checks = [Check("kubeconfig", passed=True, message=f"{server}, namespace {settings.namespace}")]
    try:
        checks.append(await _check_permissions(cluster, settings))
        checks.append(await _check_namespace(cluster, settings.namespace))
        if settings.image_pull_secret:
            checks.append(await _check_pull_secret(cluster, settings.image_pull_secret))
        checks.append(await _check_nodes(cluster))
    except HeadraceError as error:
        checks.append(Check("cluster", passed=False, message=error.message))
    return checks


def allocatable_gpus(node: Mapping[str, Any]) -> int:
    """Return the GPUs of an empty node."""
    text = str(((node.get("status") or {}).get("allocatable") or {}).get(GPU, "0"))
    return int(text) if text.isdigit() else 0


async def _check_permissions(cluster: ClusterClient, settings: KubernetesSettings) -> Check:
    permissions = (_WORKLOADS[settings.workload], *_NEEDED)
    granted = await gather_all(*(cluster.allowed(*permission) for permission in permissions))
    missing = [
        f"{verb} {resource_name}"
        for (verb, _, resource_name), allowed in zip(permissions, granted, strict=True)
        if not allowed
    ]
    message = "all that is needed" if not missing else "grant these by a Role: " + ", ".join(missing)
    return Check("rights", not missing, message)


async def _check_namespace(cluster: ClusterClient, name: str) -> Check:
    try:
        exists = await cluster.get("Namespace", name) is not None
    except HeadraceError as error:
        if refusal_code(error) != 403:
            raise
        return Check("namespace", passed=True, message=f"{name}: no permission to check it")
    return Check("namespace", exists, f"{name} exists" if exists else f"create it: kubectl create namespace {name}")


async def _check_pull_secret(cluster: ClusterClient, name: str) -> Check:
    secret = await cluster.get("Secret", name)
    if secret is None:
        message = f"{name} does not exist: `kubectl create secret docker-registry` creates it"
        return Check("image pull secret", passed=False, message=message)
    fits = secret.get("type") == "kubernetes.io/dockerconfigjson"
    return Check(
        "image pull secret", fits, f"{name} is " + ("valid" if fits else "not a secret of type docker-registry")
    )


async def _check_nodes(cluster: ClusterClient) -> Check:
    """Count the GPUs; a service may need none."""
    try:
        nodes = await cluster.list("Node")
    except HeadraceError as error:
        if refusal_code(error) != 403:
            raise
        return Check("GPUs", passed=True, message="no permission to list nodes: the scheduler will report it")
    total = sum(allocatable_gpus(node) for node in nodes)
    return Check("GPUs", passed=True, message=f"{len(nodes)} nodes with {total} allocatable {GPU}")
