# SPDX-License-Identifier: Apache-2.0
"""A `LaunchSpec` as Kubernetes objects: plain values, the same for the same spec. No I/O; applied by the driver.

The workload owns Service and Secret, so that nothing is left when it goes. No value of a secret is in a pod: it names the
Secret. Every `$` of a command or of a variable is doubled, since Kubernetes puts variables in for `$(NAME)`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from headrace.core.errors import InvalidArgument
from headrace.platforms.contract import Container, LaunchSpec, Mount
from headrace.platforms.kubernetes import names
from headrace.platforms.kubernetes.settings import KubernetesSettings

Manifest = dict[str, Any]

SERVICE_PORT = 8080
PORT_NAME = "http-ims"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
_PROBE_PERIOD = 5


def workload(spec: LaunchSpec, settings: KubernetesSettings, start: str, *, paused: bool = False) -> Manifest:
    """The Job or StatefulSet. `start`: a word of its own for each start. `paused`: no pod yet."""
    check(spec)
    count = 0 if paused else 1
    pod = {"metadata": _pod_metadata(spec, settings, start), "spec": pod_spec(spec, settings)}
    if settings.workload == "job":
        details: Manifest = {
            "parallelism": count,
            "completions": 1,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": settings.ttl_seconds,
            "template": pod,
        }
        return _thing("batch/v1", "Job", names.workload_name(spec.job_id, settings), spec, settings, {"spec": details})
    details = {
        "replicas": count,
        "serviceName": names.service_name(spec.job_id, settings),
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {**names.selector(spec.job_id, settings), names.START_LABEL: start}},
        "template": pod,
    }
    return _thing(
        "apps/v1", "StatefulSet", names.workload_name(spec.job_id, settings), spec, settings, {"spec": details}
    )


def service(spec: LaunchSpec, settings: KubernetesSettings, owner: Manifest | None = None) -> Manifest:
    """What makes the pod reachable. It selects ready pods alone."""
    port = {
        "name": PORT_NAME,
        "port": spec.host_port or SERVICE_PORT,
        "targetPort": PORT_NAME,
        "protocol": "TCP",
    }
    details = {
        "type": settings.service_type,
        "selector": names.selector(spec.job_id, settings),
        "ports": [port],
    }
    name = names.service_name(spec.job_id, settings)
    return _thing("v1", "Service", name, spec, settings, {"spec": details}, owner)


def secret(spec: LaunchSpec, settings: KubernetesSettings, owner: Manifest | None = None) -> Manifest | None:
    """The variables that nobody may see; None where there are none. Not to be shown."""
    if not spec.secret_environment:
        return None
    data = {name: base64.b64encode(value.encode()).decode() for name, value in sorted(spec.secret_environment.items())}
    name = names.secret_name(spec.job_id)
    return _thing("v1", "Secret", name, spec, settings, {"type": "Opaque", "data": data}, owner)


def owner_of(made: Mapping[str, Any], kind: str, version: str) -> Manifest:
    """A reference to the workload as it was made: it takes its own along when it goes, and waits for them."""
    return {
        "apiVersion": version,
        "kind": kind,
        "name": made["metadata"]["name"],
        "uid": made["metadata"]["uid"],
        "blockOwnerDeletion": True,
    }


def shown(manifests: Iterable[Manifest]) -> str:
    """As YAML for people and for `kubectl apply -f`; without Secrets."""
    return yaml.safe_dump_all([each for each in manifests if each["kind"] != "Secret"], sort_keys=True)


def pod_spec(spec: LaunchSpec, settings: KubernetesSettings) -> Manifest:
    """One container, which may do little more than serve."""
    volumes, mounts = _volumes(_container(spec), settings)
    made: Manifest = {
        "restartPolicy": "Never" if settings.workload == "job" else "Always",
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(settings),
        "containers": [_container_manifest(spec, settings, mounts)],
        "volumes": volumes,
    }
    if settings.image_pull_secret:
        made["imagePullSecrets"] = [{"name": settings.image_pull_secret}]
    if settings.service_account:
        made["serviceAccountName"] = settings.service_account
    if settings.node_selector:
        made["nodeSelector"] = dict(sorted(settings.node_selector.items()))
    return made


def check(spec: LaunchSpec) -> None:
    """Refuse what would not arrive as it is, before anything is made."""
    names.check_id(spec.job_id)
    container = _container(spec)
    if not _IMAGE.fullmatch(container.image):
        raise InvalidArgument(
            f"{container.image[:200]!a} is no image: registry/name:tag, and nothing else, is expected"
        )
    _check_text("the command", container.command)
    for port in (container.port, spec.host_port or SERVICE_PORT):
        if not 1 <= port <= 65_535:
            raise InvalidArgument(f"port {port} is not between 1 and 65535")
    for mount in container.mounts:
        _check_mount(mount)
    for key in (*spec.environment, *spec.secret_environment):
        if not _VARIABLE.fullmatch(key):
            raise InvalidArgument(f"{key[:100]!a} is no variable's name: letters, digits and _ alone, no digit first")
    for key, value in (*spec.environment.items(), *spec.secret_environment.items(), *spec.labels.items()):
        _check_text(f"{key!a}", value)
    both = sorted(set(spec.environment) & set(spec.secret_environment))
    if both:
        raise InvalidArgument(f"{', '.join(both)}: a variable is secret or it is not; give it once")
    if spec.gpus < 0:
        raise InvalidArgument(f"{spec.gpus} GPUs cannot be given")
    names.notes(spec.job_id, spec.labels)


def _container(spec: LaunchSpec) -> Container:
    if spec.container is None or not spec.container.image:
        raise InvalidArgument("Kubernetes runs images: name one")
    return spec.container


def _container_manifest(spec: LaunchSpec, settings: KubernetesSettings, mounts: list[Manifest]) -> Manifest:
    container = _container(spec)
    variables = {"JOB_ID": spec.job_id, **spec.environment}
    if "JOB_ID" in spec.secret_environment:
        del variables["JOB_ID"]
    made: Manifest = {
        "name": names.CONTAINER[settings.workload],
        "image": container.image,
        "command": ["/bin/sh", "-c", _as_it_is(container.command)],
        "ports": [{"name": PORT_NAME, "containerPort": container.port, "protocol": "TCP"}],
        "env": [{"name": name, "value": _as_it_is(value)} for name, value in sorted(variables.items())],
        "resources": _resources(spec, settings),
        "securityContext": _container_security(settings),
        "volumeMounts": mounts,
        **_probes(settings),
    }
    if spec.secret_environment:
        made["envFrom"] = [{"secretRef": {"name": names.secret_name(spec.job_id)}}]
    return made


def _probes(settings: KubernetesSettings) -> Manifest:
    """Started: it listens. Live: it listens still. Ready: its model is loaded, and so requests may come."""

    def ask(path: str, failures: int) -> Manifest:
        rest = {"periodSeconds": _PROBE_PERIOD, "timeoutSeconds": 5, "failureThreshold": failures}
        if not path:
            return {"tcpSocket": {"port": PORT_NAME}, **rest}
        return {"httpGet": {"path": path, "port": PORT_NAME, "scheme": "HTTP"}, **rest}

    return {
        "startupProbe": ask(settings.liveness_path, max(1, -(-settings.startup_seconds // _PROBE_PERIOD))),
        "livenessProbe": ask(settings.liveness_path, 12),
        "readinessProbe": ask(settings.readiness_path, 1),
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
    made: Manifest = {"seccompProfile": {"type": "RuntimeDefault"}}
    return {**made, "runAsNonRoot": True} if settings.restricted else made


def _container_security(settings: KubernetesSettings) -> Manifest:
    # Images of vendors run as root and read what others own: without the runtime's usual capabilities they do not start.
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
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108  # a mount point, not a file of ours
    if settings.restricted:
        volumes.append({"name": "tmp", "emptyDir": {}})
        mounts.append({"name": "tmp", "mountPath": "/tmp"})  # noqa: S108
    for number, mount in enumerate(container.mounts):
        volumes.append({"name": f"host-{number}", "hostPath": {"path": mount.host}})
        mounts.append({"name": f"host-{number}", "mountPath": mount.inside, "readOnly": True})
    return volumes, mounts


def _pod_metadata(spec: LaunchSpec, settings: KubernetesSettings, start: str) -> Manifest:
    labels = {**names.labels(spec.job_id, settings, spec.labels), names.START_LABEL: start}
    return {"labels": labels, "annotations": names.notes(spec.job_id, spec.labels)}


def _thing(
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
        "labels": names.labels(spec.job_id, settings, spec.labels),
        "annotations": names.notes(spec.job_id, spec.labels),
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _as_it_is(text: str) -> str:
    return text.replace("$", "$$")


def _check_text(what: str, text: str) -> None:
    if "\0" in text:
        raise InvalidArgument(f"{what[:100]} has a zero byte, which no program can be given")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what[:100]} is no text that UTF-8 can write") from None


def _check_mount(mount: Mount) -> None:
    for path in (mount.host, mount.inside):
        _check_text("a mount's path", path)
        if not path.startswith("/") or ":" in path or ".." in path.split("/"):
            raise InvalidArgument(f"{path[:200]!a}: a mount's paths begin with /, without : and without ..")
