# SPDX-License-Identifier: Apache-2.0
"""A `LaunchSpec` as Kubernetes objects, with their names and labels. Pure: the same objects for the same spec.

The workload owns the Service and the Secret, so that nothing is left when it is deleted. A pod refers to the Secret and
contains no secret value. Every `$` of a command or variable is doubled, since Kubernetes expands `$(NAME)`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.platforms.contract import Container, LaunchSpec, Mount, check_job_id
from headrace.platforms.kubernetes.settings import KubernetesSettings

Manifest = dict[str, Any]

SERVICE_PORT = 8080
PORT_NAME = "http-ims"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
_PROBE_PERIOD = 5


def workload(spec: LaunchSpec, settings: KubernetesSettings, start: str, *, paused: bool = False) -> Manifest:
    """Return the Job or StatefulSet. `start`: a unique id of this start. `paused`: without a pod."""
    check_spec(spec)
    count = 0 if paused else 1
    pod = {"metadata": _pod_metadata(spec, settings, start), "spec": pod_spec(spec, settings)}
    if settings.workload == "job":
        spec_fields: Manifest = {
            "parallelism": count,
            "completions": 1,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": settings.ttl_seconds,
            "template": pod,
        }
        return _object("batch/v1", "Job", workload_name(spec.job_id, settings), spec, settings, {"spec": spec_fields})
    spec_fields = {
        "replicas": count,
        "serviceName": service_name(spec.job_id, settings),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {**pod_selector(spec.job_id, settings), START_LABEL: start}},
        "template": pod,
    }
    return _object(
        "apps/v1", "StatefulSet", workload_name(spec.job_id, settings), spec, settings, {"spec": spec_fields}
    )


def service(spec: LaunchSpec, settings: KubernetesSettings, owner: Manifest | None = None) -> Manifest:
    """Return the Service of the pod."""
    port = {
        "name": PORT_NAME,
        "port": spec.host_port or SERVICE_PORT,
        "targetPort": PORT_NAME,
        "protocol": "TCP",
    }
    spec_fields = {
        "type": settings.service_type,
        "selector": pod_selector(spec.job_id, settings),
        "ports": [port],
    }
    name = service_name(spec.job_id, settings)
    return _object("v1", "Service", name, spec, settings, {"spec": spec_fields}, owner)


def secret(spec: LaunchSpec, settings: KubernetesSettings, owner: Manifest | None = None) -> Manifest | None:
    """Return the Secret with the secret variables; None if there are none. Never show it."""
    if not spec.secret_environment:
        return None
    data = {name: base64.b64encode(value.encode()).decode() for name, value in sorted(spec.secret_environment.items())}
    name = secret_name(spec.job_id)
    return _object("v1", "Secret", name, spec, settings, {"type": "Opaque", "data": data}, owner)


def owner_of(created: Mapping[str, Any], kind: str, version: str) -> Manifest:
    """Return an owner reference to the created workload: its deletion removes the owned objects first."""
    return {
        "apiVersion": version,
        "kind": kind,
        "name": created["metadata"]["name"],
        "uid": created["metadata"]["uid"],
        "blockOwnerDeletion": True,
    }


def pod_spec(spec: LaunchSpec, settings: KubernetesSettings) -> Manifest:
    """Return the spec of a pod with one container and few privileges."""
    volumes, mounts = _volumes(_container(spec), settings)
    pod: Manifest = {
        "restartPolicy": "Never" if settings.workload == "job" else "Always",
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(settings),
        "containers": [_container_manifest(spec, settings, mounts)],
        "volumes": volumes,
    }
    if settings.image_pull_secret:
        pod["imagePullSecrets"] = [{"name": settings.image_pull_secret}]
    if settings.service_account:
        pod["serviceAccountName"] = settings.service_account
    if settings.node_selector:
        pod["nodeSelector"] = dict(sorted(settings.node_selector.items()))
    return pod


def check_spec(spec: LaunchSpec) -> None:
    """Raise InvalidArgument for values that would not reach the container unchanged."""
    check_job_id(spec.job_id)
    container = _container(spec)
    if not _IMAGE.fullmatch(container.image):
        raise InvalidArgument(f"{container.image[:200]!a} is not an image: write registry/name:tag")
    _check_text("the command", container.command)
    for port in (container.port, spec.host_port or SERVICE_PORT):
        if not 1 <= port <= 65_535:
            raise InvalidArgument(f"port {port} is not between 1 and 65535")
    for mount in container.mounts:
        _check_mount(mount)
    for key in (*spec.environment, *spec.secret_environment):
        if not _VARIABLE.fullmatch(key):
            raise InvalidArgument(f"{key[:100]!a} is not a variable's name: use letters, digits and _, no digit first")
    for key, value in (*spec.environment.items(), *spec.secret_environment.items(), *spec.labels.items()):
        _check_text(f"{key!a}", value)
    duplicates = sorted(set(spec.environment) & set(spec.secret_environment))
    if duplicates:
        raise InvalidArgument(f"{', '.join(duplicates)}: given as a plain and as a secret variable; give it once")
    if spec.gpus < 0:
        raise InvalidArgument(f"{spec.gpus} GPUs cannot be given")
    job_annotations(spec.job_id, spec.labels)


def _container(spec: LaunchSpec) -> Container:
    if spec.container is None or not spec.container.image:
        raise InvalidArgument("Kubernetes runs images: name one")
    return spec.container


def _container_manifest(spec: LaunchSpec, settings: KubernetesSettings, mounts: list[Manifest]) -> Manifest:
    container = _container(spec)
    variables = {"JOB_ID": spec.job_id, **spec.environment}
    if "JOB_ID" in spec.secret_environment:
        del variables["JOB_ID"]
    manifest: Manifest = {
        "name": CONTAINER_NAMES[settings.workload],
        "image": container.image,
        "command": ["/bin/sh", "-c", _escape(container.command)],
        "ports": [{"name": PORT_NAME, "containerPort": container.port, "protocol": "TCP"}],
        "env": [{"name": name, "value": _escape(value)} for name, value in sorted(variables.items())],
        "resources": _resources(spec, settings),
        "securityContext": _container_security(settings),
        "volumeMounts": mounts,
        **_probes(settings),
    }
    if spec.secret_environment:
        manifest["envFrom"] = [{"secretRef": {"name": secret_name(spec.job_id)}}]
    return manifest


def _probes(settings: KubernetesSettings) -> Manifest:
    """Return the probes. Startup and liveness: it listens. Readiness: its model is loaded."""

    def probe(path: str, failures: int) -> Manifest:
        rest = {"periodSeconds": _PROBE_PERIOD, "timeoutSeconds": 5, "failureThreshold": failures}
        if not path:
            return {"tcpSocket": {"port": PORT_NAME}, **rest}
        return {"httpGet": {"path": path, "port": PORT_NAME, "scheme": "HTTP"}, **rest}

    return {
        "startupProbe": probe(settings.liveness_path, max(1, -(-settings.startup_seconds // _PROBE_PERIOD))),
        "livenessProbe": probe(settings.liveness_path, 12),
        "readinessProbe": probe(settings.readiness_path, 1),
    }


def _resources(spec: LaunchSpec, settings: KubernetesSettings) -> Manifest:
    limits = {}
    requests = {}
    if spec.gpus:
        limits["nvidia.com/gpu"] = str(spec.gpus)
    if settings.memory:
        limits["memory"] = requests["memory"] = settings.memory
    if settings.cpu:
        requests["cpu"] = settings.cpu
    return {"limits": limits, "requests": requests}


def _pod_security(settings: KubernetesSettings) -> Manifest:
    context: Manifest = {"seccompProfile": {"type": "RuntimeDefault"}}
    return {**context, "runAsNonRoot": True} if settings.restricted else context


def _container_security(settings: KubernetesSettings) -> Manifest:
    # Vendors' images run as root and read files of other users: they need the runtime's default capabilities.
    capabilities: Manifest = {"drop": ["ALL"]} if settings.restricted else {"drop": ["NET_RAW"]}
    if settings.ptrace:
        capabilities["add"] = ["SYS_PTRACE"]
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": settings.restricted,
        "capabilities": capabilities,
    }


def _volumes(container: Container, settings: KubernetesSettings) -> tuple[list[Manifest], list[Manifest]]:
    volumes: list[Manifest] = []
    mounts: list[Manifest] = []
    if settings.shm_size:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm_size}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108  # a mount point, not our file
    if settings.restricted:
        volumes.append({"name": "tmp", "emptyDir": {}})
        mounts.append({"name": "tmp", "mountPath": "/tmp"})  # noqa: S108
    for number, mount in enumerate(container.mounts):
        volumes.append({"name": f"host-{number}", "hostPath": {"path": mount.host}})
        mounts.append({"name": f"host-{number}", "mountPath": mount.inside, "readOnly": True})
    return volumes, mounts


def _pod_metadata(spec: LaunchSpec, settings: KubernetesSettings, start: str) -> Manifest:
    labels = {**object_labels(spec.job_id, settings, spec.labels), START_LABEL: start}
    return {"labels": labels, "annotations": job_annotations(spec.job_id, spec.labels)}


def _object(
    version: str,
    kind: str,
    name: str,
    spec: LaunchSpec,
    settings: KubernetesSettings,
    rest: Manifest,
    owner: Manifest | None = None,
) -> Manifest:
    metadata: Manifest = {
        "name": name,
        "namespace": settings.namespace,
        "labels": object_labels(spec.job_id, settings, spec.labels),
        "annotations": job_annotations(spec.job_id, spec.labels),
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _escape(text: str) -> str:
    return text.replace("$", "$$")


def _check_text(name: str, text: str) -> None:
    if "\0" in text:
        raise InvalidArgument(f"{name[:100]} has a zero byte, which no program accepts")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name[:100]} cannot be encoded as UTF-8") from None


def _check_mount(mount: Mount) -> None:
    for path in (mount.host, mount.inside):
        _check_text("a mount's path", path)
        if not path.startswith("/") or ":" in path or ".." in path.split("/"):
            raise InvalidArgument(f"{path[:200]!a}: a mount's paths begin with /, without : and without ..")


FIELD_MANAGER = "headrace"
"""The field manager of all applied objects."""
MANAGED_BY = "app.kubernetes.io/managed-by"
JOB_LABEL = "headrace-job"
"""Label of every object of a service: its job id."""
START_LABEL = "headrace-start"
"""Label of pods: the id of their start. It is immutable, so the API server accepts one of two starts of a job."""
JOB_ANNOTATION = "tao-job-id"
CONTAINER_NAMES = {"job": "tao", "statefulset": "ims-container"}

_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


def workload_name(job_id: str, settings: KubernetesSettings) -> str:
    """Return `tao-job-...` or `ims-...`."""
    return f"tao-job-{job_id}" if settings.workload == "job" else f"ims-{job_id}"


def service_name(job_id: str, settings: KubernetesSettings) -> str:
    """Return the name of the Service: that of the Job, since a user who stops it by hand knows that name only."""
    return f"tao-job-{job_id}" if settings.workload == "job" else f"ims-svc-{job_id}"


def secret_name(job_id: str) -> str:
    """Return the name of the Secret."""
    return f"tao-creds-{job_id}"


def own_labels(job_id: str | None = None) -> dict[str, str | None]:
    """Return the labels of all objects of this driver, or of one service."""
    return {MANAGED_BY: FIELD_MANAGER, JOB_LABEL: job_id}


def object_labels(job_id: str, settings: KubernetesSettings, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of every object of a service; given labels with invalid values are left out."""
    name = workload_name(job_id, settings)
    result = {key: value for key, value in labels.items() if _LABEL_VALUE.fullmatch(value)}
    if settings.workload == "job":
        result |= {"tao-job": name, "tao-sdk-job-id": job_id}
    else:
        result |= {"app": "ims", "job-id": job_id, "job": job_id, "statefulset": name}
        result |= {"service-type": "long-lived", "auto-cleanup": "false"}
    return {**result, MANAGED_BY: FIELD_MANAGER, JOB_LABEL: job_id}


def job_annotations(job_id: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the job id and every given label as annotations, whose values may be any text."""
    for key in labels:
        if not _LABEL_NAME.fullmatch(key):
            raise InvalidArgument(f"label {key!a}: its name may have letters, digits and -_. only, 63 at most")
    return {JOB_ANNOTATION: job_id, **{f"headrace/{key}": value for key, value in labels.items()}}


def pod_selector(job_id: str, settings: KubernetesSettings) -> dict[str, str]:
    """Return the selector of the Service; the Job controller sets `job-name` on its pods."""
    name = workload_name(job_id, settings)
    return {"job-name": name} if settings.workload == "job" else {"statefulset": name}


def job_id_of(document: Mapping[str, Any]) -> str:
    """Return the job id of an object."""
    return str((document["metadata"].get("labels") or {}).get(JOB_LABEL, ""))
