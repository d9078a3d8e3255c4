# SPDX-License-Identifier: Apache-2.0
"""A start request, checked and turned into a `LaunchSpec`, before anything is registered or run."""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidArgument, NotFound
from headrace.core.kv_transfer import KEY_VARIABLE
from headrace.core.nodes import MAX_NODES
from headrace.platforms import payloads
from headrace.platforms.catalogue import Architecture
from headrace.platforms.contract import PORT, Container, LaunchSpec, Mount, is_job_id
from headrace.platforms.drivers import PROCESS, check_platform
from headrace.platforms.images import Image, choose_image
from headrace.platforms.payloads import OptionValue, Payload

TARGET = "headrace.cli.service_program:main"
"""The program of a service that is a process of this machine: `headrace microservice` without other commands."""
BARE = "bare"
"""Slurm's mode without containers."""
MAX_GPUS = 1024
GRACE_SECONDS = 30.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A service to start."""

    arch: str
    model_path: str
    platform: str = PROCESS
    num_gpus: int = 1
    job_id: str = ""
    """A UUID; a new one by default."""
    image: str = ""
    """"headrace" for ours, a key of versions.yaml, or an image; "": TAO's for the architecture."""
    model_key: str = ""
    """For cosmos-predict2.5 with a model of the Hub: its program's own name of the model."""
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Options of the service's program, by their names in the architecture: `idle_timeout_minutes`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the platform: `partition`, `namespace`, `instance_id`. They are stored, so none may be secret."""
    mounts: tuple[Mount, ...] = ()
    """Folders of the host to mount into the container."""
    nodes: int = 1
    """Nodes that compute the model together; more than one only on Slurm, with our own program."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A valid start request."""

    payload: Payload
    gpus: int
    image: Image | None
    """None for `process`, and for bare processes of Slurm."""
    secret_variables: Mapping[str, str] = field(repr=False)
    mounts: tuple[Mount, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the platform."""
    nodes: int = 1

    @property
    def job_id(self) -> str:
        """The job id."""
        return self.payload.job_id

    @property
    def platform(self) -> str:
        """The platform."""
        return self.payload.platform


def plan_launch(
    request: StartRequest, arch: Architecture, environ: Mapping[str, str], versions_file: Path | None = None
) -> LaunchPlan:
    """Return the plan of a request. Raises InvalidArgument, NotFound or FailedPrecondition if it cannot be started."""
    platform = check_platform(request.platform)
    if request.job_id and not is_job_id(request.job_id):
        raise InvalidArgument(
            f"the job id {request.job_id[:64]!a} is not a UUID in lower case; leave it out for a new one"
        )
    path = _local_path(request.model_path, arch) if platform == PROCESS else request.model_path
    plain, secret = payloads.from_environment(environ, payloads.check_model_path(path, arch))
    payload = Payload(
        request.job_id or str(uuid.uuid4()), arch, path, platform, plain, request.model_key, dict(request.options)
    )
    if platform == PROCESS and (request.image or request.mounts):
        raise InvalidArgument("the platform process runs no container: leave the image and the mounts out")
    bare = platform == PROCESS or request.settings.get("mode") == BARE
    image = None if bare else choose_image(arch, environ, request.image, versions_file)
    is_headrace_image = image is None or image.own
    _check_gpus(request.num_gpus, is_headrace_image)
    _check_nodes(request.nodes, platform, is_headrace_image)
    # Check all arguments here, before anything is registered.
    payloads.program_args(payload, own_image=is_headrace_image)
    return LaunchPlan(payload, request.num_gpus, image, secret, request.mounts, request.settings, request.nodes)


def launch_spec(plan: LaunchPlan, host_port: int | None, state_dir: Path) -> LaunchSpec:
    """Return what a driver starts."""
    payload = plan.payload
    common: dict[str, Any] = {
        "host_port": host_port,
        "secret_environment": {**plan.secret_variables, **_key_of_nodes(plan)},
        "gpus": plan.gpus,
        "nodes": plan.nodes,
        "labels": {"network-arch": payload.arch.name, "job-id": plan.job_id},
    }
    if plan.platform == PROCESS:
        return LaunchSpec(plan.job_id, TARGET, _process_args(payload, state_dir), **common)
    port = _container_port(plan)
    is_headrace_image = plan.image is None or plan.image.own
    container = Container(
        "" if plan.image is None else plan.image.name,
        payloads.inner_command(payload, port, is_headrace_image),
        port,
        plan.mounts,
    )
    return LaunchSpec(plan.job_id, container=container, environment=payloads.environment(payload), **common)


def parse_mount(text: str) -> Mount:
    """Return the mount of "HOST:INSIDE", or of "PATH" for the same path inside."""
    host, _, inside = text.partition(":")
    path = Path(host).expanduser()
    if not path.exists():
        raise NotFound(f"{str(path)[:200]!a} does not exist and cannot be mounted")
    if inside and not inside.startswith("/"):
        raise InvalidArgument(f"the mount {text[:200]!a} has no absolute path inside: write HOST:/INSIDE")
    return Mount(str(path.absolute()), inside or str(path.absolute()))


def _check_gpus(count: int, is_headrace_image: bool) -> None:
    """Check the number of GPUs. Our image runs without a GPU; TAO's images do not."""
    minimum = 0 if is_headrace_image else 1
    if not minimum <= count <= MAX_GPUS:
        hint = "" if is_headrace_image else "; with --image headrace 0 are enough"
        raise InvalidArgument(f"a service gets {minimum} to {MAX_GPUS} GPUs, not {count}{hint}")


def _check_nodes(count: int, platform: str, is_headrace_image: bool) -> None:
    if not 1 <= count <= MAX_NODES:
        raise InvalidArgument(f"a service runs on 1 to {MAX_NODES} nodes, not {count}")
    if count == 1:
        return
    if platform != "slurm":
        raise InvalidArgument(
            f"the platform {platform} starts a service on one node: leave --nodes out, or use an InferenceService or slurm"
        )
    if not is_headrace_image:
        raise InvalidArgument("TAO's images run on one node: add --image headrace, or --setting mode=bare")


def _key_of_nodes(plan: LaunchPlan) -> dict[str, str]:
    """Return the key by which the nodes of a service know each other; nothing for one node."""
    return {KEY_VARIABLE: secrets.token_hex(32)} if plan.nodes > 1 else {}


def _container_port(plan: LaunchPlan) -> int:
    if plan.platform != "slurm":
        return payloads.CONTAINER_PORT
    from headrace.platforms.slurm.batch_script import node_port

    # Slurm's containers share the network of their node; the host port is a port of this machine.
    return node_port(plan.job_id)


def _local_path(text: str, arch: Architecture) -> str:
    """Return a local path as absolute, and ORG/NAME as a Hub URI. Raises NotFound if a path does not exist."""
    if "://" in text or not text:
        return text
    path = Path(text).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if exists:
        return os.path.abspath(path)
    if text.startswith(("/", ".", "~")):
        raise NotFound(f"there is no model at {text[:200]!a} on this machine")
    payloads.check_model_path(text, arch)
    return f"hf_model://{text}"


def _process_args(payload: Payload, state_dir: Path) -> tuple[str, ...]:
    args = payloads.program_args(payload, PORT, own_image=True, host=_LOOPBACK)[len(payloads.OWN_PROGRAM) - 1 :]
    # Without a gateway no one deletes an idle service: it stays, or exits by itself if it has an idle timeout.
    idle = "--exit-when-idle" if "idle_timeout_minutes" in payload.options else "--disable_auto_deletion"
    more = () if idle in args else (idle,)
    return (
        *args,
        "--models-dir",
        str(state_dir.absolute() / "models"),
        "--grace-seconds",
        f"{GRACE_SECONDS:g}",
        *more,
    )
