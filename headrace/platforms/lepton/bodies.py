# SPDX-License-Identifier: Apache-2.0
"""A service as the JSON of a Lepton deployment. Called by `driver`; does nothing by itself.

A deployment's name has at most 36 characters and begins with a letter: `tao-` and the id's 32 digits are just that, so
that the id can be read back. Secret variables are secrets of the workspace that the deployment refers to by name.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.platforms.contract import Container, LaunchSpec
from headrace.platforms.lepton.settings import LeptonSettings

_PREFIX = "tao-"
_SECRET_PREFIX = "TAO_"  # noqa: S105  # how their names begin
_SHAPE = re.compile(r"gpu\.(?:(\d+)x)?[a-z0-9.-]+")


def name_of(job_id: str) -> str:
    """What the deployment of a job is called."""
    return _PREFIX + uuid.UUID(job_id).hex


def job_of(name: str) -> str | None:
    """The job whose deployment has this name; None if it is none of ours."""
    digits = name.removeprefix(_PREFIX)
    if digits == name or not re.fullmatch(r"[0-9a-f]{32}", digits):
        return None
    return str(uuid.UUID(digits))


def secret_name(job_id: str, variable: str) -> str:
    """What the workspace's secret for a variable of a job is called."""
    return f"{_SECRET_PREFIX}{uuid.UUID(job_id).hex}_{variable}"


def job_of_secret(name: str) -> str | None:
    """The job to which a secret belongs; None if it is none of ours."""
    found = re.fullmatch(_SECRET_PREFIX + r"([0-9a-f]{32})_[A-Za-z_][A-Za-z0-9_]*", name)
    return str(uuid.UUID(found[1])) if found else None


def secrets_of(spec: LaunchSpec) -> list[dict[str, str]]:
    """The workspace's secrets that a service needs."""
    return [
        {"name": secret_name(spec.job_id, name), "value": value, "visibility": "private"}
        for name, value in spec.secret_environment.items()
    ]


def deployment_of(spec: LaunchSpec, settings: LeptonSettings) -> dict[str, Any]:
    """What is posted. Raises InvalidArgument where the platform has no place for something."""
    box = spec.container
    if box is None or not box.image:
        raise InvalidArgument("Lepton runs containers: give an image and a command")
    body: dict[str, Any] = {
        "container": {
            "image": box.image,
            "ports": [{"container_port": box.port, "protocol": "TCP"}],
            "command": [settings.shell, "-c", box.command],
        },
        "resource_requirement": _resources(spec, settings),
        "envs": _variables(spec),
        "log": {"enable_collection": True, "save_termination_logs": True},
        # A model may take long to load: only a service that no longer listens is to be restarted.
        "health": {"liveness": {"initial_delay_seconds": 600, "tcp": {"port": box.port}}},
    }
    if box.mounts:
        body["mounts"] = _mounts(box, settings)
    if settings.image_pull_secret:
        body["image_pull_secrets"] = [settings.image_pull_secret]
    if settings.public:
        body["api_tokens"] = []
        body["allow_unauthenticated_access"] = True
    elif settings.endpoint_token:
        body["api_tokens"] = [{"value": settings.endpoint_token}]
    return {"metadata": {"name": name_of(spec.job_id), "visibility": "private"}, "spec": body}


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
    found = _SHAPE.fullmatch(shape)
    if spec.gpus and (found is None or int(found[1] or 1) < spec.gpus):
        raise InvalidArgument(
            f"the resource shape {shape[:64]!a} has fewer than the {spec.gpus} GPUs that were asked for"
        )
    told: dict[str, Any] = {
        "resource_shape": shape or "cpu.small",
        "min_replicas": 1,
        "max_replicas": 1,
        "shared_memory_size": settings.shared_memory_mib,
    }
    if settings.dedicated_node_group:
        told["affinity"] = {"allowed_dedicated_node_groups": [settings.dedicated_node_group]}
    return told


def _mounts(box: Container, settings: LeptonSettings) -> list[dict[str, Any]]:
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
        for mount in box.mounts
    ]
