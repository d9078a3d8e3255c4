# SPDX-License-Identifier: Apache-2.0
"""Plan the launch of an inference microservice: from a start request to the `LaunchSpec` of a platform driver.

The planner finds the parent job, its checkpoint and the workspace's credentials, and changes nothing. A request can only
reach local files that the operator registered or allowed. Values from users, above all credentials, are secret: they go into
the secret arguments of a process or the secret variables of a container, never into a visible command line.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.errors import HeadraceError, InvalidArgument, NotFound, PermissionDenied, Unavailable
from headrace.jobs.checkpoints import CheckpointChoice, find_local, find_stored
from headrace.jobs.clouds import cloud_metadata
from headrace.jobs.records import Experiment, Job, Workspace
from headrace.jobs.secrets import Vault
from headrace.jobs.settings import ContainerSettings, JobSettings
from headrace.jobs.store.store import Store
from headrace.jobs.validation import check_arch, check_id, check_json, check_text, check_variables, keys_in, strings_in
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import (
    HubLocation,
    LocalLocation,
    ObjectLocation,
    is_hub_name,
    parse_location,
    scheme_of,
)
from headrace.platforms import payloads
from headrace.platforms.catalogue import Architecture, find, load
from headrace.platforms.contract import PORT, SECRET, Container, LaunchSpec, Mount
from headrace.platforms.images import OWN, Image, choose_image, resolve_image
from headrace.platforms.payloads import JOB_VARIABLE, PER_JOB

_NOT_SPECS = frozenset({"parent_id", "parent_job_id", "model_path", "hf_model", "network_arch", "docker_env_vars"})
_CODE_SPECS = frozenset({"trust_remote_code", "custom_pipeline_loader", "custom_inference_fn", "pipeline"})
_MAX_GPUS = 64

TAO = "tao"
"""Image setting: use the image of the architecture, from `IMAGE_<KEY>` or versions.yaml."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that a service is started with."""

    experiment: Experiment | None
    parent_id: str
    network_arch: str
    model_path: str
    specs: Mapping[str, Any]
    specs_json: str
    num_gpu: int
    workspace: Workspace | None
    metadata: Mapping[str, Any] = field(repr=False)
    variables: Mapping[str, str] = field(repr=False)
    idle_timeout_minutes: float | None = None


class LaunchPlanner:
    """Reads the store, local folders and buckets."""

    def __init__(self, store: Store, vault: Vault, settings: JobSettings) -> None:
        self._store = store
        self._vault = vault
        self._settings = settings

    async def plan(
        self,
        org: str,
        experiment_id: str | None,
        parent_id: str | None,
        extra: Mapping[str, Any],
        what: str = "start the inference microservice",
    ) -> LaunchPlan:
        """Plan a launch. `JobService.start` lists what it raises; `what` completes "Cannot ..." in error messages."""
        specs = {name: value for name, value in extra.items() if name not in _NOT_SPECS}
        specs_json = check_json(specs, "the request")
        self._check_specs(specs)
        row = await self._store.experiments.get(org, experiment_id) if experiment_id is not None else None
        if row is None and experiment_id is not None:
            raise NotFound(f"Experiment {experiment_id} not found")
        parent = await self._parent(org, parent_id, what)
        if row is None and parent is not None:
            row = await self._store.experiments.get(org, parent.experiment_id)
        experiment, secret = row if row is not None else (None, "")
        # v2 requests have no experiment that names the workspace.
        workspace_id = check_id(extra["workspace"], "Workspace") if extra.get("workspace") else ""
        workspace, details = await self._workspace(org, workspace_id or (experiment.workspace if experiment else ""))
        metadata = cloud_metadata(workspace.cloud_type, details) if workspace is not None else {}
        given_arch = extra.get("network_arch") or (parent.network_arch if parent is not None else "")
        arch = check_arch(given_arch or (experiment.network_arch if experiment is not None else "tao-dataservices"))
        model = self._requested_model(extra, metadata)
        if not model:
            if parent is None:
                raise InvalidArgument("parent_id is required: the job id of a completed training job")
            choice_fields = {**(experiment.details if experiment is not None else {}), **_checkpoint_fields(extra)}
            model = await self._checkpoint(parent, arch, choice_fields, workspace, metadata)
        variables = check_variables(self._vault.decrypt(secret, f"experiment {experiment.id}") if experiment else {})
        variables |= check_variables(extra.get("docker_env_vars"))
        gpus = _gpus(extra)
        return LaunchPlan(
            experiment if experiment_id is not None else None,
            parent.id if parent is not None else "",
            arch,
            model,
            specs,
            specs_json,
            gpus,
            workspace,
            metadata,
            variables,
            _minutes(extra.get("idle_timeout_minutes")),
        )

    def check_local(self, path: Path, *, trusted: bool = False) -> Path:
        """Return a local path that may be served; absolute, without symbolic links."""
        try:
            real = path.resolve()
            exists = real.exists()
        except (OSError, ValueError, RuntimeError):
            raise InvalidArgument("the path cannot be read") from None
        allowed = trusted or any(real.is_relative_to(folder.resolve()) for folder in self._settings.checkpoint_folders)
        if not allowed:
            raise PermissionDenied(
                "this local model is not allowed: ask the operator to register it (`headrace jobs register`), or use a "
                "folder that the operator allows"
            )
        if not exists:
            raise InvalidArgument(f"no model at {str(path)[:200]!a}")
        return real

    async def credentials(self, experiment: Experiment, secret: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the `cloud_metadata` and the environment variables for jobs of an experiment."""
        workspace, details = await self._workspace(experiment.org, experiment.workspace)
        metadata = cloud_metadata(workspace.cloud_type, details) if workspace is not None else {}
        return metadata, check_variables(self._vault.decrypt(secret, f"experiment {experiment.id}"))

    async def _parent(self, org: str, parent_id: str | None, what: str) -> Job | None:
        if parent_id is None or parent_id == "":
            return None
        checked_id = check_id(parent_id, "Parent job")
        parent = await self._store.jobs.get(checked_id)
        if parent is None or parent.org != org or parent.is_service:
            raise InvalidArgument(f"Cannot {what}: parent job {checked_id} not found")
        if parent.status != "Done":
            raise InvalidArgument(
                f"Cannot {what}: parent job {checked_id} is not in 'Done' state (current status: {parent.status})"
            )
        return parent

    async def _workspace(self, org: str, workspace_id: str) -> tuple[Workspace | None, dict[str, Any]]:
        if not workspace_id:
            return None, {}
        row = await self._store.workspaces.get(org, workspace_id)
        if row is None:
            raise NotFound(f"Workspace {workspace_id} not found")
        return row[0], self._vault.decrypt(row[1], f"workspace {row[0].id}")

    def _requested_model(self, extra: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
        hub = check_text(extra.get("hf_model"), "hf_model")
        if hub:
            text = hub if scheme_of(hub) else f"hf_model://{hub}"
            if scheme_of(text) not in ("hf_model", "hf"):
                raise InvalidArgument("hf_model must be written organisation/name")
            return str(parse_location(text))
        text = check_text(extra.get("model_path"), "model_path")
        return self._check_model(text, metadata) if text else ""

    def _check_model(self, text: str, metadata: Mapping[str, Any]) -> str:
        location = parse_location(text)
        if isinstance(location, LocalLocation):
            if not scheme_of(text) and is_hub_name(text):
                return f"hf_model://{text}"
            return str(self.check_local(location.path))
        if isinstance(location, HubLocation):
            return str(location)  # also turns hf:// into hf_model://, which services know
        if isinstance(location, ObjectLocation):
            try:
                CloudCredentials.from_metadata(metadata).keys_of(location.cloud, location.bucket)
            except PermissionDenied as error:
                raise InvalidArgument(error.message) from None
        return text

    def _check_specs(self, specs: Mapping[str, Any]) -> None:
        """Reject specs that run code or name local paths that are not allowed."""
        for text in strings_in(specs):
            check_text(text, "a value of the request", 65_536)
        code = _CODE_SPECS & keys_in(specs)
        if code and not self._settings.trust_remote_code:
            raise PermissionDenied(
                f"{', '.join(sorted(code))}: models with their own code are not allowed on this gateway"
            )
        for text in strings_in(specs):
            # `adapters` have the form name=path.
            for part in (text, text.partition("=")[2]):
                if part.startswith(("/", "~", "file:")) or ".." in part.split("/"):
                    location = parse_location(part)
                    self.check_local(location.path if isinstance(location, LocalLocation) else Path(part))

    async def _checkpoint(
        self,
        parent: Job,
        arch: str,
        choice_fields: Mapping[str, Any],
        workspace: Workspace | None,
        metadata: Mapping[str, Any],
    ) -> str:
        choice = CheckpointChoice.of(arch, parent.id, choice_fields, parent.specs)
        try:
            return await asyncio.to_thread(_find_checkpoint, parent, choice, workspace, metadata)
        except NotFound as error:
            raise InvalidArgument(f"No model path for parent job {parent.id}: {error.message}") from None
        except PermissionDenied as error:
            raise InvalidArgument(f"No model path for parent job {parent.id}: {error.message}") from None
        except Unavailable:
            raise
        except HeadraceError as error:
            raise InvalidArgument(f"No model path for parent job {parent.id}: {error.message}") from None


def _find_checkpoint(
    parent: Job, choice: CheckpointChoice, workspace: Workspace | None, metadata: Mapping[str, Any]
) -> str:
    """Return the path or URL of a parent job's checkpoint. Blocks."""
    text = parent.checkpoint
    if text:
        location = parse_location(text)
    elif workspace is not None and workspace.bucket:
        scheme = "gs" if workspace.cloud_type == "gcp" else workspace.cloud_type
        location = parse_location(f"{scheme}://{workspace.bucket}/results/{parent.id}")
    else:
        raise NotFound("it has no checkpoint, and its experiment has no workspace with a bucket")
    if isinstance(location, LocalLocation):
        return find_local(location.path, choice)
    if isinstance(location, ObjectLocation):
        cloud = workspace.cloud_type if workspace is not None else location.cloud
        return find_stored(location, cloud, CloudCredentials.from_metadata(metadata), choice)
    return str(location) if isinstance(location, HubLocation) else text


def _checkpoint_fields(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint fields of the request."""
    names = ("checkpoint_choose_method", "checkpoint_epoch_number")
    return {name: extra[name] for name in names if extra.get(name) is not None}


def _gpus(extra: Mapping[str, Any]) -> int:
    value = extra.get("num_gpus", extra.get("num_gpu"))
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= _MAX_GPUS:
        raise InvalidArgument(f"num_gpus must be an integer up to {_MAX_GPUS}")
    return max(1, value)


def _minutes(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 525_600:
        raise InvalidArgument("idle_timeout_minutes must be a number from 0 to 525600; 0 for never")
    return float(value)


def launch_spec(job: Job, plan: LaunchPlan, settings: JobSettings, callback_url: str, callback_key: str) -> LaunchSpec:
    """Return what a driver starts. InvalidArgument or FailedPrecondition if the image cannot serve the model."""
    callbacks = _callbacks(job, callback_url, callback_key)
    if settings.containers is not None:
        return _container_spec(job, plan, settings, settings.containers, callbacks)
    variables = {**plan.variables, **_public_variables(job, plan, "process"), **callbacks}
    args = (
        *settings.service_args,
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
        *_lifetime_args(plan, settings, callbacks),
    )
    return LaunchSpec(
        job.id,
        settings.service_target,
        args,
        secrets={"job": json.dumps(_job_payload(job, plan)), "docker_env_vars": json.dumps(variables)},
        gpus=plan.num_gpu,
        labels=_labels(job),
    )


def _container_spec(
    job: Job, plan: LaunchPlan, settings: JobSettings, containers: ContainerSettings, callbacks: Mapping[str, str]
) -> LaunchSpec:
    image, arch = _image(plan, containers)
    # Slurm services share their node's network, so each needs its own port. The driver reports a conflict.
    port = _port_of(job.id, settings.port_range) if containers.platform == "slurm" else payloads.CONTAINER_PORT
    public = _public_variables(job, plan, containers.platform)
    secret = {**{name: value for name, value in plan.variables.items() if name not in PER_JOB}, **callbacks}
    if arch is None:
        args = (*payloads.OWN_PROGRAM, "--job-id", job.id, "--host", payloads.ANY_ADDRESS, "--port", str(port))
        command = f"{payloads.PREFIX}exec {shlex.join((*args, *_lifetime_args(plan, settings, callbacks)))}"
        secret[JOB_VARIABLE] = json.dumps(_job_payload(job, plan))
    elif arch.command == "job":
        job_args = ("--docker_env_vars", json.dumps(public, separators=(",", ":")), *_port_args(arch, port))
        command = f'{payloads.PREFIX}{shlex.join(arch.program)} --job "${JOB_VARIABLE}" {shlex.join(job_args)}'
        secret[JOB_VARIABLE] = json.dumps(_job_payload(job, plan))
    else:
        key = plan.specs.get("model_key")
        payload = payloads.Payload(
            job.id, arch, plan.model_path, containers.platform, model_key=key if isinstance(key, str) else ""
        )
        command = payloads.inner_command(payload, port)
    return LaunchSpec(
        job.id,
        container=Container("" if image is None else image.name, command, port, () if image is None else _mounts(plan)),
        environment=public,
        secret_environment=secret,
        gpus=plan.num_gpu if containers.gpus else 0,
        labels=_labels(job),
    )


def _image(plan: LaunchPlan, containers: ContainerSettings) -> tuple[Image | None, Architecture | None]:
    """Return the image, and the architecture whose program it contains; None for Headrace, which serves all."""
    if containers.bare:
        return None, None
    if containers.image == TAO:
        arch = find(load(), plan.network_arch)
        return Image(resolve_image(arch, containers.environ), False), arch
    image = choose_image(Architecture(plan.network_arch, "", ""), containers.environ, containers.image or OWN)
    return image, None if image.own else find(load(), plan.network_arch)


def _lifetime_args(plan: LaunchPlan, settings: JobSettings, callbacks: Mapping[str, str]) -> tuple[str, ...]:
    minutes = settings.idle_timeout_minutes if plan.idle_timeout_minutes is None else plan.idle_timeout_minutes
    enabled = bool(minutes) and (bool(callbacks) or settings.containers is None)
    idle_args = ("--idle-timeout-minutes", f"{minutes:g}") if enabled else ("--disable_auto_deletion",)
    return ("--grace-seconds", f"{settings.grace_seconds:g}", *idle_args)


def _port_args(arch: Architecture, port: int) -> tuple[str, ...]:
    return ("--port", str(port)) if arch.port == "always" or port != payloads.CONTAINER_PORT else ()


def _port_of(job_id: str, port_range: tuple[int, int]) -> int:
    return port_range[0] + uuid.UUID(job_id).int % (port_range[1] - port_range[0] + 1)


def _mounts(plan: LaunchPlan) -> tuple[Mount, ...]:
    """Return mounts of local models, at the same paths in the container."""
    paths = [plan.model_path, plan.specs.get("base_model_path")]
    local_paths = dict.fromkeys(path for path in paths if isinstance(path, str) and path.startswith("/"))
    return tuple(Mount(path, path) for path in local_paths)


def _labels(job: Job) -> dict[str, str]:
    return {"org": job.org, "experiment": job.experiment_id, "job": job.id}


def _job_payload(job: Job, plan: LaunchPlan) -> Mapping[str, Any]:
    specs: dict[str, Any] = {**plan.specs, "model_path": plan.model_path}
    if plan.workspace is not None and plan.workspace.bucket:
        specs["results_dir"] = f"{plan.workspace.cloud_type}://{plan.workspace.bucket}/results/{job.id}"
    payload: dict[str, Any] = {"job_id": job.id, "specs": specs, "neural_network_name": plan.network_arch}
    if plan.metadata:
        payload["cloud_metadata"] = plan.metadata
    return payload


def _public_variables(job: Job, plan: LaunchPlan, platform: str) -> dict[str, str]:
    """Return the environment variables that are not secret."""
    return {
        "TAO_EXECUTION_BACKEND": payloads.BACKENDS[platform],
        "TAO_API_JOB_ID": job.id,
        "CLOUD_BASED": "True" if plan.metadata else "False",
    }


def _callbacks(job: Job, callback_url: str, callback_key: str) -> dict[str, str]:
    """Return the variables by which a service reaches the gateway; none without a callback URL."""
    if not callback_url:
        return {}
    path = f"/api/v1/orgs/{job.org}/experiments/{job.experiment_id}/jobs/{job.id}"
    return {"TAO_LOGGING_SERVER_URL": callback_url.rstrip("/") + path, "TAO_ADMIN_KEY": callback_key}
