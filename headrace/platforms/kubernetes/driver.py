# SPDX-License-Identifier: Apache-2.0
"""The driver `kubernetes`: see `contract.Driver`. Called by the launcher and the gateway.

A start makes the workload without a pod, then what the pod needs, owned by the workload, and then lets the pod come:
whatever is cut short in between is found by the workload's label, and goes with it.
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
from headrace.platforms.contract import Check, Handle, LaunchSpec, Observed
from headrace.platforms.kubernetes import manifests, names
from headrace.platforms.kubernetes.addresses import address
from headrace.platforms.kubernetes.checking import GPU, gpus_of, preflight
from headrace.platforms.kubernetes.cluster import Cluster, Refused, Thing, together
from headrace.platforms.kubernetes.observing import newest, observe
from headrace.platforms.kubernetes.settings import KubernetesSettings

log = logging.getLogger("headrace.launch")

_POLL_SECONDS = 0.05
_SLOWEST_POLL_SECONDS = 1.0


class KubernetesDriver:
    """Services of one namespace, all of the same kind of workload."""

    name = "kubernetes"

    def __init__(self, settings: KubernetesSettings | None = None) -> None:
        self._settings = settings or KubernetesSettings()
        self._cluster = Cluster(self._settings)
        self._kind = "Job" if self._settings.workload == "job" else "StatefulSet"
        self._version = "batch/v1" if self._settings.workload == "job" else "apps/v1"

    @property
    def place(self) -> str:
        """Which cluster and namespace, and which kind of workload."""
        try:
            server = self._cluster.server
        except FailedPrecondition:
            server = "?"  # told by whatever is asked of it next
        return f"kubernetes:{server}:{self._settings.namespace}:{self._settings.workload}"

    async def preflight(self) -> list[Check]:
        """See `contract.Driver.preflight`."""
        return await preflight(self._cluster, self._settings)

    async def start(self, spec: LaunchSpec) -> Handle:
        """See `contract.Driver.start`."""
        start = secrets.token_hex(8)
        paused = manifests.workload(spec, self._settings, start, paused=True)
        await self._check_room(spec.gpus)
        # A server may do what it was sent after whoever sent it has gone: that is seen to its end, and then undone.
        beginning = asyncio.ensure_future(self._begin(spec, paused, start))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            await asyncio.wait([beginning])
            if not beginning.cancelled() and beginning.exception() is None:
                with contextlib.suppress(HeadraceError, Refused, TimeoutError):
                    await self._delete(spec.job_id)
            raise

    async def _begin(self, spec: LaunchSpec, paused: Thing, start: str) -> Handle:
        """From nothing to a workload whose pod may come, or to nothing again."""
        made = await self._claim(spec, paused, start)
        try:
            owner = manifests.owner_of(made, self._kind, self._version)
            private = manifests.secret(spec, self._settings, owner)
            owned = [manifests.service(spec, self._settings, owner)] + ([private] if private is not None else [])
            await together(*(self._apply(each) for each in owned))
            await self._apply(manifests.workload(spec, self._settings, start))
        except BaseException:
            with contextlib.suppress(HeadraceError, Refused, TimeoutError):
                await asyncio.shield(self._delete(spec.job_id))
            raise
        return Handle(
            spec.job_id,
            self.name,
            {"platform_job_id": made["metadata"]["name"], "namespace": self._settings.namespace},
        )

    async def status(self, handle: Handle) -> Observed:
        """See `contract.Driver.status`."""
        workload, pods = await self._look(handle.job_id)
        event = ""
        if workload is not None and not pods:
            event = await self._complaint(workload)
        return observe(workload, pods, event)

    async def logs(self, handle: Handle, tail: int) -> str:
        """See `contract.Driver.logs`."""
        names.check_id(handle.job_id)
        try:
            pod = newest(await self._cluster.list("Pod", names.ours(handle.job_id)))
            if pod is None or not (pod.get("spec") or {}).get("nodeName"):
                return ""
            container = names.CONTAINER[self._settings.workload]
            return await self._cluster.log(pod["metadata"]["name"], container, tail)
        except Refused as refused:
            if refused.code in (400, 404):  # the container is not made yet, or the pod has gone meanwhile
                return ""
            raise refused.told from None

    async def endpoint(self, handle: Handle) -> str | None:
        """See `contract.Driver.endpoint`."""
        (workload, pods), service = await together(self._look(handle.job_id), self._service(handle.job_id))
        observed = observe(workload, pods)
        if service is None or observed.phase in ("ended", "gone"):
            return None
        return address(service, newest(pods), self._settings)

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """See `contract.Driver.stop`."""
        job_id = names.check_id(handle.job_id)
        grace = max(1, math.ceil(grace_seconds))
        limit = time.monotonic() + grace + self._settings.delete_seconds
        pause = _POLL_SECONDS
        shortened: set[str] = set()
        try:
            await self._delete(job_id)
            while left := await self._left(job_id):
                for pod in left:
                    # The workload's end gives its pods their own grace; what was asked for may be less.
                    if pod["kind"] == "Pod" and pod["metadata"]["uid"] not in shortened:
                        shortened.add(pod["metadata"]["uid"])
                        await self._cluster.delete("Pod", pod["metadata"]["name"], grace=grace)
                if time.monotonic() > limit:
                    told = ", ".join(f"{each['kind']} {each['metadata']['name']}" for each in left)
                    raise Unavailable(
                        f"{told} of namespace {self._settings.namespace} do not go away; is the node alive? "
                        "`kubectl delete pod NAME --force` removes a dead node's pod"
                    )
                await asyncio.sleep(pause)
                pause = min(pause * 1.3, _SLOWEST_POLL_SECONDS)
        except Refused as refused:
            raise refused.told from None

    async def found(self) -> dict[str, Observed]:
        """See `contract.Driver.found`: one list of workloads and one of pods, however many there are."""
        try:
            workloads, pods = await together(
                self._cluster.list(self._kind, names.ours()), self._cluster.list("Pod", names.ours())
            )
        except Refused as refused:
            raise refused.told from None
        of: dict[str, list[Thing]] = {}
        for pod in pods:
            of.setdefault(names.job_of(pod), []).append(pod)
        return {names.job_of(each): observe(each, of.get(names.job_of(each), [])) for each in workloads}

    async def close(self) -> None:
        """See `contract.Driver.close`."""
        await self._cluster.close()

    # Starting

    async def _check_room(self, gpus: int) -> None:
        if not gpus or not self._settings.check_gpus:
            return
        try:
            most = max((gpus_of(node) for node in await self._cluster.list("Node")), default=0)
        except Refused as refused:
            if refused.code == 403:
                return  # whoever may not look at nodes is told by the scheduler
            raise refused.told from None
        if most < gpus:
            raise ResourceExhausted(
                f"{gpus} GPUs are asked for, and the largest node of the cluster has {most} (allocatable {GPU}); ask for "
                "fewer, or set TAO_K8S_SKIP_NODE_RUNTIME_CHECK=true where nodes are made when they are needed"
            )

    async def _claim(self, spec: LaunchSpec, paused: Thing, start: str) -> Thing:
        """Make the workload, which of several starts of one job only one can: the others' pods would differ."""
        try:
            return await self._cluster.apply(paused)
        except Refused as refused:
            if refused.code != 422:
                raise refused.told from None
            there = await self._get(paused["metadata"]["name"])
            if there is None or _start_of(there) == start:
                raise refused.told from None
            state = "is still being removed" if there["metadata"].get("deletionTimestamp") else "was started before"
            raise AlreadyExists(
                f"a service of job {spec.job_id} {state} in namespace {self._settings.namespace}"
            ) from None

    async def _apply(self, thing: Thing) -> Thing:
        try:
            return await self._cluster.apply(thing)
        except Refused as refused:
            raise refused.told from None

    # Looking

    async def _look(self, job_id: str) -> tuple[Thing | None, list[Thing]]:
        names.check_id(job_id)
        try:
            workload, pods = await together(
                self._cluster.get(self._kind, names.workload_name(job_id, self._settings)),
                self._cluster.list("Pod", names.ours(job_id)),
            )
        except Refused as refused:
            raise refused.told from None
        return workload, pods

    async def _get(self, name: str) -> Thing | None:
        try:
            return await self._cluster.get(self._kind, name)
        except Refused as refused:
            raise refused.told from None

    async def _service(self, job_id: str) -> Thing | None:
        names.check_id(job_id)
        try:
            return await self._cluster.get("Service", names.service_name(job_id, self._settings))
        except Refused as refused:
            raise refused.told from None

    async def _complaint(self, workload: Thing) -> str:
        """What the controllers say where no pod comes: a quota, a Pod Security Standard, a webhook."""
        try:
            events = await self._cluster.list("Event", uid=workload["metadata"]["uid"])
        except Refused:
            return ""
        warnings = [each for each in events if each.get("type") == "Warning" and each.get("message")]
        last = max(warnings, key=lambda each: each.get("lastTimestamp") or "", default=None)
        return "" if last is None else f"{last.get('reason', '')}: {last['message']}"[:500]

    # Stopping

    async def _delete(self, job_id: str) -> None:
        await self._cluster.delete(self._kind, names.workload_name(job_id, self._settings), foreground=True)

    async def _left(self, job_id: str) -> list[Thing]:
        """All that is left of a service; what its workload no longer takes along is sent away."""
        kinds = (self._kind, "Pod", "Service", "Secret")
        lists = await together(*(self._cluster.list(kind, names.ours(job_id)) for kind in kinds))
        left = [{**each, "kind": kind} for kind, found in zip(kinds, lists, strict=True) for each in found]
        if not lists[0]:
            for each in left:
                if each["kind"] != "Pod" and not each["metadata"].get("deletionTimestamp"):
                    await self._cluster.delete(each["kind"], each["metadata"]["name"])
        return left


def _start_of(workload: Mapping[str, Any]) -> str:
    labels = workload["spec"]["template"]["metadata"].get("labels") or {}
    return str(labels.get(names.START_LABEL, ""))
