# SPDX-License-Identifier: Apache-2.0
"""The status and the URL of a service, from what the API server reports of its workload, pods and Service. Pure.

Kubernetes retries for ever if an image cannot be pulled or a container cannot be created. Here such a service counts as
ended, with the reason, although it would run if the cause went away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.platforms.contract import PlatformStatus
from headrace.platforms.kubernetes.settings import KubernetesSettings
from headrace.platforms.kubernetes_client.objects import Document

_FATAL_REASONS = {
    "ImagePullBackOff": "the image cannot be pulled: check its name, and the image pull secret",
    "ErrImageNeverPull": "the image is not on the node, and the pull policy is Never",
    "InvalidImageName": "the image's name is not valid",
    "CreateContainerError": "the container cannot be created",
    "CreateContainerConfigError": "the container cannot be created: the pod refers to something that is missing",
    "RunContainerError": "the container cannot be run",
}
_CRASHES = 2
"""Restarts after which a service in a crash loop counts as failed."""
_MAX_REASON = 500
_SIGNAL_BASE = 128


def service_status(workload: Document | None, pods: Sequence[Document], event: str = "") -> PlatformStatus:
    """Return the status of a service. `event`: the last warning of the controllers, if it was read."""
    pod = newest_pod(pods)
    name = pod["metadata"]["name"] if pod is not None else ""
    if workload is None:
        # Its pods may still terminate, or the workload alone was deleted.
        return PlatformStatus("gone") if pod is None else _terminating_status(pod)
    name = name or workload["metadata"]["name"]
    if workload["metadata"].get("deletionTimestamp"):
        return (
            _terminating_status(pod)
            if pod is not None
            else PlatformStatus("ended", name, "Terminating", reason="it is being removed")
        )
    finished = _finished_job(workload, pod, name)
    if finished is not None:
        return finished
    if pod is None:
        return PlatformStatus("starting", name, "Pending", reason=_without_pod(workload, event))
    return _pod_status(pod)


def newest_pod(pods: Sequence[Document]) -> Document | None:
    """Return the current pod: one that is not being deleted, then the latest."""
    return max(
        pods,
        key=lambda pod: (
            not pod["metadata"].get("deletionTimestamp"),
            pod["metadata"].get("creationTimestamp") or "",
            pod["metadata"]["name"],
        ),
        default=None,
    )


def _finished_job(workload: Document, pod: Document | None, name: str) -> PlatformStatus | None:
    for condition in _status(workload).get("conditions") or ():
        if condition["status"] != "True":
            continue
        if condition["type"] == "Complete":
            return PlatformStatus("ended", name, "Succeeded", 0, "the program has ended")
        if condition["type"] == "Failed":
            if pod is not None and _status(pod).get("phase") == "Failed":
                return _failed_pod(pod)
            detail = _join(condition.get("reason"), condition.get("message"))
            return PlatformStatus("ended", name, "Failed", reason=detail or "the Job has failed")
    return None


def _without_pod(workload: Document, event: str) -> str:
    details = workload.get("spec") or {}
    if details.get("parallelism", details.get("replicas", 1)) == 0:
        return "its start was interrupted: stop it, and start it again"
    return event or "its pod is not created yet"


def _pod_status(pod: Document) -> PlatformStatus:
    status = _status(pod)
    name = pod["metadata"]["name"]
    phase = status.get("phase") or "Pending"
    if pod["metadata"].get("deletionTimestamp"):
        return _terminating_status(pod)
    if phase == "Succeeded":
        return PlatformStatus("ended", name, "Succeeded", 0, "the program has ended")
    if phase == "Failed":
        return _failed_pod(pod)
    if phase == "Unknown":
        return PlatformStatus("running", name, "Unknown", reason=_join(status.get("reason"), status.get("message")))
    container = _container_status(pod)
    waiting = (container.get("state") or {}).get("waiting")
    if waiting is not None:
        return _waiting_status(pod, container, waiting)
    if phase == "Running":
        ended = (container.get("state") or {}).get("terminated")
        if ended is not None:  # between two restarts of a crash loop
            return PlatformStatus("starting", name, "Pending", ended.get("exitCode"), _exit_reason(ended))
        return PlatformStatus("running", name, "Running")
    return PlatformStatus("starting", name, "Pending", reason=_unscheduled_reason(pod))


def _waiting_status(pod: Document, container: Document, waiting: Document) -> PlatformStatus:
    name = pod["metadata"]["name"]
    reason = waiting.get("reason") or ""
    detail = _join(reason, waiting.get("message"))
    if reason in _FATAL_REASONS:
        return PlatformStatus("ended", name, "Failed", reason=_join(_FATAL_REASONS[reason], detail))
    if reason == "CrashLoopBackOff":
        last = (container.get("lastState") or {}).get("terminated") or {}
        detail = _join("the program ends again and again", _exit_reason(last) if last else detail)
        if (container.get("restartCount") or 0) >= _CRASHES:
            return PlatformStatus("ended", name, "Failed", last.get("exitCode"), detail)
        return PlatformStatus("starting", name, "Pending", last.get("exitCode"), detail)
    if reason in ("", "ContainerCreating", "PodInitializing"):
        detail = ""
    return PlatformStatus(
        "starting", name, "Pending", reason=detail or "the image is pulled and the container is created"
    )


def _failed_pod(pod: Document) -> PlatformStatus:
    status = _status(pod)
    name = pod["metadata"]["name"]
    ended = (_container_status(pod).get("state") or {}).get("terminated") or {}
    if status.get("reason"):  # Evicted, NodeLost, DeadlineExceeded: the pod was ended, not its program
        detail = _join(status["reason"], status.get("message"))
        return PlatformStatus("ended", name, "Failed", ended.get("exitCode"), detail)
    return PlatformStatus(
        "ended", name, "Failed", ended.get("exitCode"), _exit_reason(ended) if ended else "the pod has failed"
    )


def _terminating_status(pod: Document) -> PlatformStatus:
    is_alive = _status(pod).get("phase") == "Running"
    return PlatformStatus(
        "running" if is_alive else "ended", pod["metadata"]["name"], "Terminating", reason="it is being removed"
    )


def _exit_reason(ended: Document) -> str:
    code = ended.get("exitCode")
    if ended.get("reason") == "OOMKilled":
        return f"the program ran out of memory (OOMKilled, code {code}): allow it more, or serve a smaller model"
    detail = f"the program has ended with code {code}"
    if isinstance(code, int) and code > _SIGNAL_BASE:
        detail = f"the program was ended by signal {code - _SIGNAL_BASE}"
    return _join(detail, ended.get("message"))


def _unscheduled_reason(pod: Document) -> str:
    for condition in _status(pod).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            detail = _join(condition.get("reason"), condition.get("message"))
            if "nvidia.com/gpu" in detail:
                return f"no node has that many free GPUs: {detail}"
            return f"no node takes it: {detail}"
    return "it waits for a node"


def _status(document: Document) -> Mapping[str, Any]:
    return document.get("status") or {}


def _container_status(pod: Document) -> Mapping[str, Any]:
    statuses: Sequence[Mapping[str, Any]] = _status(pod).get("containerStatuses") or ({},)
    return statuses[0]


def _join(first: object, second: object) -> str:
    return ": ".join(str(part) for part in (first, second) if part)[:_MAX_REASON]


def service_url(service: Document, pod: Document | None, settings: KubernetesSettings) -> str | None:
    """Return the URL of a Service; None until the cluster has assigned one."""
    details = service.get("spec") or {}
    port = details["ports"][0]
    if details.get("type") == "LoadBalancer":
        ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or [{}]
        # Some clouds assign an IP address, others a host name.
        return _url(ingress[0].get("ip") or ingress[0].get("hostname"), port["port"])
    if details.get("type") == "NodePort":
        node = ((pod or {}).get("status") or {}).get("hostIP")
        return _url(settings.node_host or node, port.get("nodePort"))
    return _url(f"{service['metadata']['name']}.{settings.namespace}.svc", port["port"])


def _url(host: str | None, port: int | None) -> str | None:
    if not host or not port:
        return None
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
