# SPDX-License-Identifier: Apache-2.0
"""What somebody wants started, checked, and as a `LaunchSpec`. Called by `launcher`, before anything is recorded or run."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidArgument, NotFound
from headrace.platforms import payloads, variables
from headrace.platforms.catalogue import Architecture
from headrace.platforms.contract import PORT, Container, LaunchSpec, Mount
from headrace.platforms.drivers import PROCESS, check_platform
from headrace.platforms.folders import is_id
from headrace.platforms.images import Image, choose_image
from headrace.platforms.payloads import OptionValue, Payload

TARGET = "headrace.cli.service_program:main"
"""The program of a service that is a process of this machine: `headrace microservice` without the other verbs."""
BARE = "bare"
"""Slurm's mode without a container."""
MOST_GPUS = 1024
GRACE_SECONDS = 30.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A service to be started."""

    arch: str
    model_path: str
    platform: str = PROCESS
    num_gpus: int = 1
    job_id: str = ""
    """A UUID; a new one unless told."""
    image: str = ""
    """"headrace" for ours, a key of versions.yaml, or an image; "": TAO's for the architecture."""
    model_key: str = ""
    """For cosmos-predict2.5 with a model of the Hub: what its program calls the model."""
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """Of the service's own program, by the names that the architecture has: `idle_timeout_minutes`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the platform: `partition`, `namespace`, `instance_id`. They are recorded, so nothing secret is taken."""
    mounts: tuple[Mount, ...] = ()
    """Folders of the host that the container sees."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that was found right."""

    payload: Payload
    gpus: int
    image: Image | None
    """None for `process`, and for Slurm's bare processes."""
    secret_variables: Mapping[str, str] = field(repr=False)
    mounts: tuple[Mount, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the platform."""

    @property
    def job_id(self) -> str:
        """Its name everywhere."""
        return self.payload.job_id

    @property
    def platform(self) -> str:
        """Where."""
        return self.payload.platform


def plan_of(
    request: StartRequest, arch: Architecture, environ: Mapping[str, str], versions_file: Path | None = None
) -> Plan:
    """Raises InvalidArgument, NotFound or FailedPrecondition for what cannot be started."""
    platform = check_platform(request.platform)
    if request.job_id and not is_id(request.job_id):
        raise InvalidArgument(
            f"the job id {request.job_id[:64]!a} is no UUID in lower case; leave it out for a new one"
        )
    path = _local(request.model_path, arch) if platform == PROCESS else request.model_path
    plain, secret = variables.from_environment(environ, payloads.check_model_path(path, arch))
    payload = Payload(
        request.job_id or str(uuid.uuid4()), arch, path, platform, plain, request.model_key, dict(request.options)
    )
    if platform == PROCESS and (request.image or request.mounts):
        raise InvalidArgument("the platform process runs no container: leave the image and the mounts out")
    bare = platform == PROCESS or request.settings.get("mode") == BARE
    image = None if bare else choose_image(arch, environ, request.image, versions_file)
    own = image is None or image.own
    _check_gpus(request.num_gpus, own)
    # All that can be wrong with the words is found here, before anything is recorded.
    payloads.program_words(payload, own_image=own)
    return Plan(payload, request.num_gpus, image, secret, request.mounts, request.settings)


def spec_of(plan: Plan, host_port: int | None, state_dir: Path) -> LaunchSpec:
    """What a driver starts."""
    payload = plan.payload
    common: dict[str, Any] = {
        "host_port": host_port,
        "secret_environment": dict(plan.secret_variables),
        "gpus": plan.gpus,
        "labels": {"network-arch": payload.arch.name, "job-id": plan.job_id},
    }
    if plan.platform == PROCESS:
        return LaunchSpec(plan.job_id, TARGET, _process_words(payload, state_dir), **common)
    port = _port_inside(plan)
    own = plan.image is None or plan.image.own
    container = Container(
        "" if plan.image is None else plan.image.name, payloads.inner_command(payload, port, own), port, plan.mounts
    )
    return LaunchSpec(plan.job_id, container=container, environment=payloads.environment(payload), **common)


def mount_of(text: str) -> Mount:
    """A mount from "HOST:INSIDE", or "PATH" for the same place inside."""
    host, _, inside = text.partition(":")
    path = Path(host).expanduser()
    if not path.exists():
        raise NotFound(f"there is no {str(path)[:200]!a} to mount")
    if inside and not inside.startswith("/"):
        raise InvalidArgument(f"the mount {text[:200]!a} names no absolute path inside: write HOST:/INSIDE")
    return Mount(str(path.absolute()), inside or str(path.absolute()))


def _check_gpus(number: int, own: bool) -> None:
    """Ours serves without a GPU; TAO's programs do not."""
    least = 0 if own else 1
    if not least <= number <= MOST_GPUS:
        told = "" if own else "; with --image headrace 0 are enough"
        raise InvalidArgument(f"a service gets {least} to {MOST_GPUS} GPUs, not {number}{told}")


def _port_inside(plan: Plan) -> int:
    if plan.platform != "slurm":
        return payloads.PORT_INSIDE
    from headrace.platforms.slurm.script import node_port

    # Slurm's containers share the network of their node. The host's port is one of this machine, not of that one.
    return node_port(plan.job_id)


def _local(text: str, arch: Architecture) -> str:
    """A path of this machine as an absolute one, and ORG/NAME as the Hub's; where there is nothing, that is told now."""
    if "://" in text or not text:
        return text
    path = Path(text).expanduser()
    try:
        there = path.exists()
    except (OSError, ValueError):
        there = False
    if there:
        return os.path.abspath(path)
    if text.startswith(("/", ".", "~")):
        raise NotFound(f"there is no model at {text[:200]!a} on this machine")
    payloads.check_model_path(text, arch)
    return f"hf_model://{text}"


def _process_words(payload: Payload, state_dir: Path) -> tuple[str, ...]:
    words = payloads.program_words(payload, PORT, own_image=True, host=_LOOPBACK)[len(payloads.OWN_PROGRAM) - 1 :]
    # Without the gateway nobody is there to be asked for deletion: a service stays, or ends by itself where it is told when.
    idle = "--exit-when-idle" if "idle_timeout_minutes" in payload.options else "--disable_auto_deletion"
    more = () if idle in words else (idle,)
    return (
        *words,
        "--models-dir",
        str(state_dir.absolute() / "models"),
        "--grace-seconds",
        f"{GRACE_SECONDS:g}",
        *more,
    )
