# SPDX-License-Identifier: Apache-2.0
"""From a start request to everything that a service is started with, or to why it cannot be. Called by `services`.

Finds the parent job, its checkpoint and the workspace's credentials. A request may name models and folders, so nothing of
this machine is reachable by it but what the operator registered or opened. Changes nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.errors import HeadraceError, InvalidArgument, NotFound, PermissionDenied, Unavailable
from headrace.jobs.checkpoints import Choice, find_local, find_stored
from headrace.jobs.checks import check_arch, check_id, check_json, check_text, keys_in, strings_in
from headrace.jobs.clouds import cloud_metadata
from headrace.jobs.environment import check_variables
from headrace.jobs.records import Experiment, Job, Workspace
from headrace.jobs.secrets import Vault
from headrace.jobs.settings import JobSettings
from headrace.jobs.store.store import Store
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import HubPlace, LocalPlace, ObjectPlace, parse_location, scheme_of

_NOT_SPECS = frozenset({"parent_id", "parent_job_id", "model_path", "hf_model", "network_arch", "docker_env_vars"})
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_RUNS_CODE = frozenset({"trust_remote_code", "custom_pipeline_loader", "custom_inference_fn", "pipeline"})
_MOST_GPUS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """A service that can be started."""

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


class Planner:
    """Asks the store, the disk and the bucket."""

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
    ) -> Plan:
        """See `JobService.start` for what it raises. `what`: which cannot be done, for the text of an error."""
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
        # v2 has no experiment that says it.
        named = check_id(extra["workspace"], "Workspace") if extra.get("workspace") else ""
        workspace, details = await self._workspace(org, named or (experiment.workspace if experiment else ""))
        metadata = cloud_metadata(workspace.cloud_type, details) if workspace is not None else {}
        given_arch = extra.get("network_arch") or (parent.network_arch if parent is not None else "")
        arch = check_arch(given_arch or (experiment.network_arch if experiment is not None else "tao-dataservices"))
        model = self._given_model(extra, metadata)
        if not model:
            if parent is None:
                raise InvalidArgument("parent_id is required: the job id of a completed training job")
            said = {**(experiment.details if experiment is not None else {}), **_choosing(extra)}
            model = await self._checkpoint(parent, arch, said, workspace, metadata)
        variables = check_variables(self._vault.decrypt(secret, f"experiment {experiment.id}") if experiment else {})
        variables |= check_variables(extra.get("docker_env_vars"))
        gpus = _gpus(extra)
        return Plan(
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
        """A path of this machine that may be served; absolute, without links."""
        try:
            real = path.resolve()
            there = real.exists()
        except (OSError, ValueError, RuntimeError):
            raise InvalidArgument("the path cannot be read") from None
        allowed = trusted or any(real.is_relative_to(each.resolve()) for each in self._settings.checkpoint_folders)
        if not allowed:
            raise PermissionDenied(
                "models of this machine are registered by its operator (`headrace jobs register`), or lie in a folder that "
                "the operator has opened for them"
            )
        if not there:
            raise InvalidArgument(f"there is no model at {str(path)[:200]!a}")
        return real

    async def credentials(self, experiment: Experiment, secret: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Of an experiment's workspace, as `cloud_metadata` of a job; and the variables that its jobs get."""
        workspace, details = await self._workspace(experiment.org, experiment.workspace)
        metadata = cloud_metadata(workspace.cloud_type, details) if workspace is not None else {}
        return metadata, check_variables(self._vault.decrypt(secret, f"experiment {experiment.id}"))

    async def _parent(self, org: str, parent_id: str | None, what: str) -> Job | None:
        if parent_id is None or parent_id == "":
            return None
        wanted = check_id(parent_id, "Parent job")
        parent = await self._store.jobs.get(wanted)
        if parent is None or parent.org != org or parent.is_service:
            raise InvalidArgument(f"Cannot {what}: parent job {wanted} not found")
        if parent.status != "Done":
            raise InvalidArgument(
                f"Cannot {what}: parent job {wanted} is not in 'Done' state (current status: {parent.status})"
            )
        return parent

    async def _workspace(self, org: str, workspace_id: str) -> tuple[Workspace | None, dict[str, Any]]:
        if not workspace_id:
            return None, {}
        row = await self._store.workspaces.get(org, workspace_id)
        if row is None:
            raise NotFound(f"Workspace {workspace_id} not found")
        return row[0], self._vault.decrypt(row[1], f"workspace {row[0].id}")

    def _given_model(self, extra: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
        hub = check_text(extra.get("hf_model"), "hf_model")
        if hub:
            text = hub if scheme_of(hub) else f"hf_model://{hub}"
            if scheme_of(text) not in ("hf_model", "hf"):
                raise InvalidArgument("hf_model is written organisation/name")
            return str(parse_location(text))
        text = check_text(extra.get("model_path"), "model_path")
        return self._checked_model(text, metadata) if text else ""

    def _checked_model(self, text: str, metadata: Mapping[str, Any]) -> str:
        place = parse_location(text)
        if isinstance(place, LocalPlace):
            if not scheme_of(text) and _HUB_NAME.fullmatch(text):
                return f"hf_model://{text}"
            return str(self.check_local(place.path))
        if isinstance(place, HubPlace):
            return str(place)  # hf:// too, in the word that services know
        if isinstance(place, ObjectPlace):
            try:
                CloudCredentials.from_metadata(metadata).keys_of(place.cloud, place.bucket)
            except PermissionDenied as error:
                raise InvalidArgument(error.message) from None
        return text

    def _check_specs(self, specs: Mapping[str, Any]) -> None:
        """Words of the model's configuration that reach further than the model."""
        for text in strings_in(specs):
            check_text(text, "a value of the request", 65_536)
        code = _RUNS_CODE & keys_in(specs)
        if code and not self._settings.trust_remote_code:
            raise PermissionDenied(
                f"{', '.join(sorted(code))}: models with code of their own are not allowed here; the operator decides that"
            )
        for text in strings_in(specs):
            # `adapters` are written name=path.
            for part in (text, text.partition("=")[2]):
                if part.startswith(("/", "~", "file:")) or ".." in part.split("/"):
                    found = parse_location(part)
                    self.check_local(found.path if isinstance(found, LocalPlace) else Path(part))

    async def _checkpoint(
        self,
        parent: Job,
        arch: str,
        said: Mapping[str, Any],
        workspace: Workspace | None,
        metadata: Mapping[str, Any],
    ) -> str:
        choice = Choice.of(arch, parent.id, said, parent.specs)
        try:
            return await asyncio.to_thread(_find, parent, choice, workspace, metadata)
        except NotFound as error:
            raise InvalidArgument(f"No model path for parent job {parent.id}: {error.message}") from None
        except PermissionDenied as error:
            raise InvalidArgument(f"No model path for parent job {parent.id}: {error.message}") from None
        except Unavailable:
            raise
        except HeadraceError as error:
            raise InvalidArgument(f"No model path for parent job {parent.id}: {error.message}") from None


def _find(parent: Job, choice: Choice, workspace: Workspace | None, metadata: Mapping[str, Any]) -> str:
    """Blocks."""
    text = parent.checkpoint
    if text:
        place = parse_location(text)
    elif workspace is not None and workspace.bucket:
        scheme = "gs" if workspace.cloud_type == "gcp" else workspace.cloud_type
        place = parse_location(f"{scheme}://{workspace.bucket}/results/{parent.id}")
    else:
        raise NotFound("it has no checkpoint, and its experiment no workspace with a bucket where results lie")
    if isinstance(place, LocalPlace):
        return find_local(place.path, choice)
    if isinstance(place, ObjectPlace):
        cloud = workspace.cloud_type if workspace is not None else place.cloud
        return find_stored(place, cloud, CloudCredentials.from_metadata(metadata), choice)
    return str(place) if isinstance(place, HubPlace) else text


def _choosing(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Which checkpoint the request itself asks for."""
    names = ("checkpoint_choose_method", "checkpoint_epoch_number")
    return {name: extra[name] for name in names if extra.get(name) is not None}


def _gpus(extra: Mapping[str, Any]) -> int:
    value = extra.get("num_gpus", extra.get("num_gpu"))
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= _MOST_GPUS:
        raise InvalidArgument(f"num_gpus must be a whole number up to {_MOST_GPUS}")
    return max(1, value)


def _minutes(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 525_600:
        raise InvalidArgument("idle_timeout_minutes must be a number of 0 to 525600; 0 for never")
    return float(value)
