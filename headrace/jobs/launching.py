# SPDX-License-Identifier: Apache-2.0
"""A job and its plan as a `LaunchSpec`: the command line of a microservice, ours or TAO's. Called by `services`.

Whatever users gave, credentials above all, is secret: among the secret words of a process, in the secret variables of a
container. A command line has ids, numbers and our own folders.
"""

from __future__ import annotations

import json
import shlex
import uuid
from collections.abc import Mapping
from typing import Any

from headrace.jobs.planning import Plan
from headrace.jobs.records import Job
from headrace.jobs.settings import ContainerSettings, JobSettings
from headrace.platforms import payloads
from headrace.platforms.architecture import Architecture
from headrace.platforms.catalogue import find, load
from headrace.platforms.contract import PORT, SECRET, Container, LaunchSpec, Mount
from headrace.platforms.images import OWN, Image, choose_image, resolve_image
from headrace.platforms.variables import PER_JOB

TAO = "tao"
"""As an image: that of the architecture, by `IMAGE_<KEY>` and versions.yaml."""
JOB_VARIABLE = "HEADRACE_JOB"
"""Has the job for a container: our program reads it, for TAO's the shell inside puts it after `--job`."""


def launch_spec(job: Job, plan: Plan, settings: JobSettings, callback_url: str, callback_key: str) -> LaunchSpec:
    """What a driver starts. Raises InvalidArgument or FailedPrecondition for what its image cannot serve."""
    callbacks = _callbacks(job, callback_url, callback_key)
    if settings.containers is not None:
        return _contained(job, plan, settings, settings.containers, callbacks)
    variables = {**plan.variables, **_about(job, plan, "process"), **callbacks}
    words = (
        *settings.service_words,
        "--job",
        SECRET % "job",
        "--docker_env_vars",
        SECRET % "docker_env_vars",
        "--job-id",
        job.id,
        "--host",
        settings.service_host,
        "--port",
        PORT,
        "--models-dir",
        str(settings.models_folder.absolute()),
        *_lifetime(plan, settings, callbacks),
    )
    return LaunchSpec(
        job.id,
        settings.service_target,
        words,
        secrets={"job": json.dumps(_job(job, plan)), "docker_env_vars": json.dumps(variables)},
        gpus=plan.num_gpu,
        labels=_labels(job),
    )


def _contained(
    job: Job, plan: Plan, settings: JobSettings, containers: ContainerSettings, callbacks: Mapping[str, str]
) -> LaunchSpec:
    image, arch = _image(plan, containers)
    # Slurm's services share the network of their node: each needs a port of its own there. The driver tells of a clash.
    port = _port_of(job.id, settings.port_range) if containers.platform == "slurm" else payloads.PORT_INSIDE
    about = _about(job, plan, containers.platform)
    secret = {**{name: value for name, value in plan.variables.items() if name not in PER_JOB}, **callbacks}
    if arch is None:
        words = (*payloads.OWN_PROGRAM, "--job-id", job.id, "--host", payloads.ANY_ADDRESS, "--port", str(port))
        line = f"{payloads.PREFIX}exec {shlex.join((*words, *_lifetime(plan, settings, callbacks)))}"
        secret[JOB_VARIABLE] = json.dumps(_job(job, plan))
    elif arch.command == "job":
        more = ("--docker_env_vars", json.dumps(about, separators=(",", ":")), *_port_words(arch, port))
        line = f'{payloads.PREFIX}{shlex.join(arch.program)} --job "${JOB_VARIABLE}" {shlex.join(more)}'
        secret[JOB_VARIABLE] = json.dumps(_job(job, plan))
    else:
        key = plan.specs.get("model_key")
        payload = payloads.Payload(
            job.id, arch, plan.model_path, containers.platform, model_key=key if isinstance(key, str) else ""
        )
        line = payloads.inner_command(payload, port)
    return LaunchSpec(
        job.id,
        container=Container("" if image is None else image.name, line, port, () if image is None else _mounts(plan)),
        environment=about,
        secret_environment=secret,
        gpus=plan.num_gpu if containers.gpus else 0,
        labels=_labels(job),
    )


def _image(plan: Plan, containers: ContainerSettings) -> tuple[Image | None, Architecture | None]:
    """What is run, and the architecture whose program it has; None for ours, which serves them all."""
    if containers.bare:
        return None, None
    if containers.image == TAO:
        arch = find(load(), plan.network_arch)
        return Image(resolve_image(arch, containers.environ), False), arch
    image = choose_image(Architecture(plan.network_arch, "", ""), containers.environ, containers.image or OWN)
    return image, None if image.own else find(load(), plan.network_arch)


def _lifetime(plan: Plan, settings: JobSettings, callbacks: Mapping[str, str]) -> tuple[str, ...]:
    minutes = settings.idle_timeout_minutes if plan.idle_timeout_minutes is None else plan.idle_timeout_minutes
    asks = bool(minutes) and (bool(callbacks) or settings.containers is None)
    idle = ("--idle-timeout-minutes", f"{minutes:g}") if asks else ("--disable_auto_deletion",)
    return ("--grace-seconds", f"{settings.grace_seconds:g}", *idle)


def _port_words(arch: Architecture, port: int) -> tuple[str, ...]:
    return ("--port", str(port)) if arch.port == "always" or port != payloads.PORT_INSIDE else ()


def _port_of(job_id: str, among: tuple[int, int]) -> int:
    return among[0] + uuid.UUID(job_id).int % (among[1] - among[0] + 1)


def _mounts(plan: Plan) -> tuple[Mount, ...]:
    """Models of this machine's disks, where the container looks for them."""
    paths = [plan.model_path, plan.specs.get("base_model_path")]
    found = dict.fromkeys(path for path in paths if isinstance(path, str) and path.startswith("/"))
    return tuple(Mount(path, path) for path in found)


def _labels(job: Job) -> dict[str, str]:
    return {"org": job.org, "experiment": job.experiment_id, "job": job.id}


def _job(job: Job, plan: Plan) -> Mapping[str, Any]:
    specs: dict[str, Any] = {**plan.specs, "model_path": plan.model_path}
    if plan.workspace is not None and plan.workspace.bucket:
        specs["results_dir"] = f"{plan.workspace.cloud_type}://{plan.workspace.bucket}/results/{job.id}"
    made: dict[str, Any] = {"job_id": job.id, "specs": specs, "neural_network_name": plan.network_arch}
    if plan.metadata:
        made["cloud_metadata"] = plan.metadata
    return made


def _about(job: Job, plan: Plan, platform: str) -> dict[str, str]:
    """What everybody may see."""
    return {
        "TAO_EXECUTION_BACKEND": payloads.BACKENDS[platform],
        "TAO_API_JOB_ID": job.id,
        "CLOUD_BASED": "True" if plan.metadata else "False",
    }


def _callbacks(job: Job, callback_url: str, callback_key: str) -> dict[str, str]:
    """By which a service reaches the gateway; none where there is no way."""
    if not callback_url:
        return {}
    path = f"/api/v1/orgs/{job.org}/experiments/{job.experiment_id}/jobs/{job.id}"
    return {"TAO_LOGGING_SERVER_URL": callback_url.rstrip("/") + path, "TAO_ADMIN_KEY": callback_key}
