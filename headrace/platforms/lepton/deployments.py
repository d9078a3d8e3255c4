# SPDX-License-Identifier: Apache-2.0
"""A service as a Lepton deployment: the JSON that creates it, and the status that the API reports. No I/O.

The name of a deployment has at most 36 characters and starts with a letter: `tao-` and the 32 digits of the job id fit
exactly, so the id can be read back. Secret variables are secrets of the workspace that the deployment refers to by name.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.platforms.contract import Container, LaunchSpec, PlatformStatus
from headrace.platforms.lepton.settings import LeptonSettings

_PREFIX = "tao-"
_SECRET_PREFIX = "TAO_"  # noqa: S105  # how their names begin
_STARTING_STATES = ("Starting", "Updating", "Scaling", "Migrating", "Restarting")
_NEVER_STARTED = PlatformStatus("ended", pod_phase="Failed", reason="it was never started: its start was interrupted")
_SHAPE = re.compile(r"gpu\.(?:(\d+)x)?[a-z0-9.-]+")


def deployment_name(job_id: str) -> str:
    """Return the name of a job's deployment."""
    return _PREFIX + uuid.UUID(job_id).hex


def job_of_deployment(name: str) -> str | None:
    """Return the job of a deployment's name; None for other deployments."""
    digits = name.removeprefix(_PREFIX)
    if digits == name or not re.fullmatch(r"[0-9a-f]{32}", digits):
        return None
    return str(uuid.UUID(digits))


def secret_name(job_id: str, variable: str) -> str:
    """Return the name of the workspace's secret for a variable of a job."""
    return f"{_SECRET_PREFIX}{uuid.UUID(job_id).hex}_{variable}"


def job_of_secret(name: str) -> str | None:
    """Return the job of a secret; None for other secrets."""
    match = re.fullmatch(_SECRET_PREFIX + r"([0-9a-f]{32})_[A-Za-z_][A-Za-z0-9_]*", name)
    return str(uuid.UUID(match[1])) if match else None


def secret_bodies(spec: LaunchSpec) -> list[dict[str, str]]:
    """Return the secrets of a service."""
    return [
        {"name": secret_name(spec.job_id, name), "value": value, "visibility": "private"}
        for name, value in spec.secret_environment.items()
    ]


def deployment_body(spec: LaunchSpec, settings: LeptonSettings) -> dict[str, Any]:
    """Return the JSON of a deployment. Raises InvalidArgument for what the platform does not support."""
    container = spec.container
    if container is None or not container.image:
        raise InvalidArgument("Lepton runs containers: give an image and a command")
    body: dict[str, Any] = {
        "container": {
            "image": container.image,
            "ports": [{"container_port": container.port, "protocol": "TCP"}],
            "command": [settings.shell, "-c", container.command],
        },
        "resource_requirement": _resources(spec, settings),
        "envs": _variables(spec),
        "log": {"enable_collection": True, "save_termination_logs": True},
        # A model may take long to load: restart a service only if it does not listen.
        "health": {"liveness": {"initial_delay_seconds": 600, "tcp": {"port": container.port}}},
    }
    if container.mounts:
        body["mounts"] = _mounts(container, settings)
    if settings.image_pull_secret:
        body["image_pull_secrets"] = [settings.image_pull_secret]
    if settings.public:
        body["api_tokens"] = []
        body["allow_unauthenticated_access"] = True
    elif settings.endpoint_token:
        body["api_tokens"] = [{"value": settings.endpoint_token}]
    return {"metadata": {"name": deployment_name(spec.job_id), "visibility": "private"}, "spec": body}


def _variables(spec: LaunchSpec) -> list[dict[str, Any]]:
    plain = [{"name": name, "value": value} for name, value in spec.environment.items()]
    secret = [
        {"name": name, "value_from": {"secret_name_ref": secret_name(spec.job_id, name)}}
        for name in spec.secret_environment
    ]
    return [*plain, *secret]


def _resources(spec: LaunchSpec, settings: LeptonSettings) -> dict[str, Any]:
    shape = settings.resource_shape
    if not shape and spec.gpus:
        raise InvalidArgument(
            "Lepton needs a resource shape for GPUs: set resource_shape, for instance gpu.8xh100-sxm "
            "(`lep node resource-shape` and the dashboard list what the workspace has)"
        )
    match = _SHAPE.fullmatch(shape)
    if spec.gpus and (match is None or int(match[1] or 1) < spec.gpus):
        raise InvalidArgument(f"the resource shape {shape[:64]!a} has fewer than the {spec.gpus} requested GPUs")
    resources: dict[str, Any] = {
        "resource_shape": shape or "cpu.small",
        "min_replicas": 1,
        "max_replicas": 1,
        "shared_memory_size": settings.shared_memory_mib,
    }
    if settings.dedicated_node_group:
        resources["affinity"] = {"allowed_dedicated_node_groups": [settings.dedicated_node_group]}
    return resources


def _mounts(container: Container, settings: LeptonSettings) -> list[dict[str, Any]]:
    if not settings.storage:
        raise InvalidArgument(
            "Lepton has no folders of this machine: copy the files to the workspace's storage and name it in the setting "
            "storage (node-nfs:NAME), or use a model path hf_model://"
        )
    return [
        {
            "path": mount.host,
            "from": settings.storage,
            "mount_path": mount.inside,
            "mount_options": {"read_only": True},
        }
        for mount in container.mounts
    ]


def never_started() -> PlatformStatus:
    """Return the status of a job with secrets and no deployment."""
    return _NEVER_STARTED


def deployment_state(deployment: Mapping[str, Any]) -> str:
    """Return the state of a deployment. `phase` is preferred, since `state` hides that it was stopped."""
    status = deployment.get("status")
    fields = status if isinstance(status, Mapping) else {}
    return str(fields.get("phase") or fields.get("state") or "")


def needs_details(deployment: Mapping[str, Any]) -> bool:
    """Whether its terminations and issues are needed to know its status."""
    return deployment_state(deployment) in ("Not Ready", "Error", "Restarting")


def deployment_status(
    deployment: Mapping[str, Any],
    terminations: Mapping[str, Any] | None = None,
    issues: Mapping[str, Any] | None = None,
) -> PlatformStatus:
    """Return the status. A replica that ended counts as ended, although the platform restarts it again and again."""
    name = deployment_id(deployment)
    state = deployment_state(deployment)
    last = _last(terminations or {})
    if state == "Ready":
        return PlatformStatus("running", name, "Running")
    if state == "Deleting":
        return PlatformStatus("ended", name, "Terminating", reason="it is being deleted")
    if state in ("Stopping", "Stopped"):
        return PlatformStatus("ended", name, "Succeeded", reason="it was stopped on the platform: it has no replicas")
    if last is not None and state not in ("Starting", "Updating"):
        code = last.get("exit_code")
        exit_code = code if isinstance(code, int) else None
        detail = ", ".join(str(last[key])[:500] for key in ("reason", "message") if last.get(key))
        reason = f"the container ended with code {exit_code}" + (f" ({detail})" if detail else "")
        return PlatformStatus("ended", name, "Succeeded" if exit_code == 0 else "Failed", exit_code, reason)
    if state == "Error":
        return PlatformStatus("ended", name, "Failed", reason=_issue(issues or {}) or "the platform reports an error")
    if state in _STARTING_STATES or state == "Not Ready":
        return PlatformStatus("starting", name, "Pending", reason=_issue(issues or {}))
    return PlatformStatus("starting", name, "Unknown")


def deployment_id(deployment: Mapping[str, Any]) -> str:
    """Return the id of a deployment in the API."""
    metadata = deployment.get("metadata")
    fields = metadata if isinstance(metadata, Mapping) else {}
    return str(fields.get("id") or fields.get("name") or "")


def given_name(deployment: Mapping[str, Any]) -> str:
    """Return the name that its creator gave it."""
    metadata = deployment.get("metadata")
    fields = metadata if isinstance(metadata, Mapping) else {}
    return str(fields.get("name") or fields.get("id") or "")


def endpoint_url(deployment: Mapping[str, Any]) -> str | None:
    """Return its external URL."""
    status = deployment.get("status")
    endpoint = status.get("endpoint") if isinstance(status, Mapping) else None
    url = endpoint.get("external_endpoint") if isinstance(endpoint, Mapping) else None
    return str(url).rstrip("/") if url else None


def log_lines(answer: object, tail: int) -> str:
    """Return the last lines of a log query: streams of (time, line) pairs."""
    data = answer.get("data") if isinstance(answer, Mapping) else None
    streams = data.get("result") if isinstance(data, Mapping) else None
    pairs: list[tuple[int, str]] = []
    for stream in streams if isinstance(streams, Sequence) else ():
        for moment, line in stream.get("values") or ():
            pairs.append((int(moment), str(line)))
    pairs.sort(key=lambda pair: pair[0])
    return "\n".join("\n".join(line for _, line in pairs).splitlines()[-tail:]) if tail > 0 else ""


def _last(terminations: Mapping[str, Any]) -> Mapping[str, Any] | None:
    items = [item for group in terminations.values() if isinstance(group, list) for item in group]
    records = [item for item in items if isinstance(item, Mapping)]
    return max(records, key=lambda item: item.get("finished_at") or 0, default=None)


def _issue(issues: Mapping[str, Any]) -> str:
    for group in issues.values():
        for issue in group if isinstance(group, list) else ():
            if isinstance(issue, Mapping) and issue.get("reason") not in (None, "Ready"):
                return f"{issue['reason']}: {issue.get('message') or ''}"[:500].rstrip(": ")
    return ""
