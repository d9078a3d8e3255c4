# SPDX-License-Identifier: Apache-2.0
"""Routes of workspaces and experiments. They are alike on v1 and v2."""

from __future__ import annotations

from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.jobs.api.handlers import Call, Response
from headrace.jobs.api.requests import Fields, parse_number, parse_uuid
from headrace.jobs.api.responses import experiment, page, workspace
from headrace.jobs.backups import BackupLocation, backup_location
from headrace.jobs.records import ExperimentChange, ExperimentSpec, WorkspaceSpec
from headrace.jobs.service import JobService

_MAX_NAME = 255
_MAX_DELETED = 500
_RESPONSE_FIELDS = ("id", "user_id", "created_on", "last_modified", "type")
"""Fields of a response that a client may send back."""
_EXPERIMENT_FIELDS = ("network_arch", "name", "description", "workspace", "docker_env_vars")


class WorkspaceRoutes:
    """Actions for workspaces. `created_status`: the HTTP status for a new workspace."""

    def __init__(self, jobs: JobService, created_status: int = 200) -> None:
        self._jobs = jobs
        self._created_status = created_status

    async def list(self, call: Call) -> Response:
        """List those of the organisation."""
        items = [workspace(record) for record in await self._jobs.list_workspaces(call.org)]
        return Response(_page("workspaces", items, call))

    async def create(self, call: Call) -> Response:
        """Create a workspace, or return the existing one with the same configuration."""
        record, new = await self._jobs.create_workspace(call.org, call.user_id, _workspace_spec(call.fields(), True))
        content = workspace(record)
        if not new and self._created_status == 201:
            content |= {
                "_duplicate": True,
                "_message": "a workspace with this configuration already exists; it is returned",
            }
        return Response(content, self._created_status if new else 200)

    async def show(self, call: Call) -> Response:
        """Return one."""
        return Response(workspace(await self._jobs.get_workspace(call.org, _id(call))))

    async def change(self, call: Call) -> Response:
        """Change one (PUT and PATCH): missing fields keep their values."""
        spec = _workspace_spec(call.fields(), False)
        return Response(workspace(await self._jobs.update_workspace(call.org, _id(call), spec)))

    async def delete(self, call: Call) -> Response:
        """Delete one."""
        return Response(workspace(await self._jobs.delete_workspace(call.org, _id(call))))

    async def delete_many(self, call: Call) -> Response:
        """Delete several, or none if one of them cannot be deleted."""
        ids = call.fields().rest().get("workspace_ids")
        if (
            not isinstance(ids, list)
            or not 0 < len(ids) <= _MAX_DELETED
            or not all(isinstance(item, str) for item in ids)
        ):
            raise InvalidArgument(f"workspace_ids must be a list of 1 to {_MAX_DELETED} ids of workspaces")
        deleted = await self._jobs.delete_workspaces(
            call.org, [parse_uuid(workspace_id, "Workspace") for workspace_id in ids]
        )
        return Response(
            {
                "message": f"{len(deleted)} workspaces are deleted",
                "workspaces": [workspace(record) for record in deleted],
            }
        )

    async def backup(self, call: Call) -> Response:
        """Back up the organisation to a bucket."""
        fields = call.fields()
        location, name = (
            await self._backup_location(call, fields),
            fields.text("backup_file_name", max_chars=_MAX_NAME) or "",
        )
        result = await self._jobs.backups.backup(call.org, location, name)
        return Response({"message": "The backup is written", **result})

    async def restore(self, call: Call) -> Response:
        """Restore missing records."""
        fields = call.fields()
        location, name = (
            await self._backup_location(call, fields),
            fields.text("backup_file_name", max_chars=_MAX_NAME) or "",
        )
        result = await self._jobs.backups.restore(call.org, location, name)
        return Response({"message": "What was missing is restored", **result})

    async def _backup_location(self, call: Call, fields: Fields) -> BackupLocation:
        """Return the bucket of the path's workspace, or of the body's `workspace_metadata`."""
        if call.ids:
            return await self._jobs.backup_location(call.org, _id(call))
        given = fields.object("workspace_metadata")
        if given is None:
            raise InvalidArgument(
                "workspace_metadata is missing: give cloud_type and cloud_specific_details, or name a workspace in the path"
            )
        metadata = Fields(given)
        return backup_location(
            metadata.text("cloud_type", max_chars=_MAX_NAME) or "", metadata.object("cloud_specific_details") or {}
        )


class ExperimentRoutes:
    """Actions for experiments."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs

    async def list(self, call: Call) -> Response:
        """List those of the organisation."""
        items = [experiment(record) for record in await self._jobs.list_experiments(call.org)]
        return Response(_page("experiments", items, call))

    async def create(self, call: Call) -> Response:
        """Create an experiment."""
        spec = experiment_spec(call.fields())
        return Response(experiment(await self._jobs.create_experiment(call.org, call.user_id, spec)))

    async def show(self, call: Call) -> Response:
        """Return one."""
        experiment_id = parse_uuid(call.ids[0], "Experiment")
        return Response(experiment(await self._jobs.get_experiment(call.org, experiment_id)))

    async def change(self, call: Call) -> Response:
        """Change one (PUT and PATCH): missing fields keep their values."""
        fields = call.fields()
        experiment_id = parse_uuid(call.ids[0], "Experiment")
        arch = fields.text("network_arch", max_chars=_MAX_NAME)
        if arch is not None and arch != (await self._jobs.get_experiment(call.org, experiment_id)).network_arch:
            raise InvalidArgument("network_arch of an experiment cannot be changed: create a new experiment")
        workspace = fields.uuid("Workspace", "workspace")
        change = ExperimentChange(
            fields.text("name", max_chars=_MAX_NAME),
            fields.text("description"),
            workspace,
            fields.object("docker_env_vars"),
            fields.rest(*_EXPERIMENT_FIELDS, *_RESPONSE_FIELDS),
        )
        return Response(experiment(await self._jobs.update_experiment(call.org, experiment_id, change)))

    async def base(self, call: Call) -> Response:
        """List NVIDIA's base experiments. There are none here, but clients ask for them."""
        return Response(_page("experiments", [], call))

    async def delete(self, call: Call) -> Response:
        """Delete one with its finished jobs."""
        experiment_id = parse_uuid(call.ids[0], "Experiment")
        return Response(experiment(await self._jobs.delete_experiment(call.org, experiment_id)))


def experiment_spec(fields: Fields, *more: str) -> ExperimentSpec:
    """Read an experiment from a body; `more` names fields that do not belong to it."""
    arch = fields.text("network_arch", max_chars=_MAX_NAME)
    if not arch:
        raise InvalidArgument('network_arch is missing: name the kind of model, such as "cosmos-rl"')
    return ExperimentSpec(
        arch,
        fields.text("name", max_chars=_MAX_NAME) or "",
        fields.text("description") or "",
        fields.uuid("Workspace", "workspace") or "",
        fields.object("docker_env_vars") or {},
        fields.rest(*_EXPERIMENT_FIELDS, *more),
    )


def _workspace_spec(fields: Fields, new: bool) -> WorkspaceSpec:
    cloud_type = fields.text("cloud_type", max_chars=_MAX_NAME)
    if new and not cloud_type:
        raise InvalidArgument("cloud_type is missing: aws, azure, seaweedfs, huggingface or self_hosted")
    return WorkspaceSpec(
        fields.text("name", max_chars=_MAX_NAME),
        cloud_type,
        fields.object("cloud_specific_details"),
        fields.flag("shared"),
        fields.text("version", max_chars=64),
        force_create=bool(fields.flag("force_create")),
    )


def _id(call: Call) -> str:
    return parse_uuid(call.ids[0], "Workspace")


def _page(name: str, items: list[dict[str, Any]], call: Call) -> dict[str, Any]:
    query = call.query()
    wanted_name = query.get("name")
    if wanted_name is not None:
        items = [item for item in items if item["name"] == wanted_name]
    skip, size = parse_number(query, "skip") or 0, parse_number(query, "size")
    return page(name, items[skip : None if size is None else skip + size], skip, size, len(items))
