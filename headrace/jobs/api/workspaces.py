# SPDX-License-Identifier: Apache-2.0
"""Workspaces and experiments: where models and media lie, and what jobs belong to. Alike on v1 and v2."""

from __future__ import annotations

from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.jobs.api.calls import Answer, Call
from headrace.jobs.api.reading import Fields, number_of, uuid_of
from headrace.jobs.api.writing import experiment, page, workspace
from headrace.jobs.backups import BackupPlace, backup_place
from headrace.jobs.records import ExperimentChange, ExperimentWish, WorkspaceWish
from headrace.jobs.service import JobService

_MOST_NAME = 255
_MOST_AT_ONCE = 500
_OURS = ("id", "user_id", "created_on", "last_modified", "type")
"""What an answer has and a client may send back."""
_EXPERIMENT = ("network_arch", "name", "description", "workspace", "docker_env_vars")


class Workspaces:
    """Work for `calls`. `made`: the status of something new."""

    def __init__(self, jobs: JobService, made: int = 200) -> None:
        self._jobs = jobs
        self._made = made

    async def list(self, call: Call) -> Answer:
        """Those of an organisation."""
        found = [workspace(each) for each in await self._jobs.list_workspaces(call.org)]
        return Answer(_cut("workspaces", found, call))

    async def create(self, call: Call) -> Answer:
        """A new one, or the one that is the same."""
        record, new = await self._jobs.create_workspace(call.org, call.user_id, _workspace_wish(call.fields(), True))
        told = workspace(record)
        if not new and self._made == 201:
            told |= {"_duplicate": True, "_message": "a workspace with this configuration exists already: here it is"}
        return Answer(told, self._made if new else 200)

    async def show(self, call: Call) -> Answer:
        """One."""
        return Answer(workspace(await self._jobs.get_workspace(call.org, _id(call))))

    async def change(self, call: Call) -> Answer:
        """PUT and PATCH: what is not said stays."""
        wish = _workspace_wish(call.fields(), False)
        return Answer(workspace(await self._jobs.update_workspace(call.org, _id(call), wish)))

    async def delete(self, call: Call) -> Answer:
        """Remove one."""
        return Answer(workspace(await self._jobs.delete_workspace(call.org, _id(call))))

    async def delete_many(self, call: Call) -> Answer:
        """Remove several, or none if one of them cannot be."""
        ids = call.fields().rest().get("workspace_ids")
        if not isinstance(ids, list) or not 0 < len(ids) <= _MOST_AT_ONCE or not all(isinstance(x, str) for x in ids):
            raise InvalidArgument(f"workspace_ids must be a list of 1 to {_MOST_AT_ONCE} ids of workspaces")
        found = await self._jobs.delete_workspaces(call.org, [uuid_of(each, "Workspace") for each in ids])
        return Answer({"message": f"{len(found)} workspaces are deleted", "workspaces": [workspace(x) for x in found]})

    async def backup(self, call: Call) -> Answer:
        """Write all that the organisation has into a bucket."""
        fields = call.fields()
        place, name = await self._backup_place(call, fields), fields.text("backup_file_name", most=_MOST_NAME) or ""
        told = await self._jobs.backups.backup(call.org, place, name)
        return Answer({"message": "The backup is written", **told})

    async def restore(self, call: Call) -> Answer:
        """Put back what is missing."""
        fields = call.fields()
        place, name = await self._backup_place(call, fields), fields.text("backup_file_name", most=_MOST_NAME) or ""
        told = await self._jobs.backups.restore(call.org, place, name)
        return Answer({"message": "What was missing is restored", **told})

    async def _backup_place(self, call: Call, fields: Fields) -> BackupPlace:
        """The bucket of the path's workspace; or of the body's `workspace_metadata`, where there may be none yet."""
        if call.ids:
            return await self._jobs.backup_place(call.org, _id(call))
        given = fields.object("workspace_metadata")
        if given is None:
            raise InvalidArgument(
                "workspace_metadata is missing: give cloud_type and cloud_specific_details, or name a workspace in the path"
            )
        told = Fields(given)
        return backup_place(told.text("cloud_type", most=_MOST_NAME) or "", told.object("cloud_specific_details") or {})


class Experiments:
    """Work for `calls`."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs

    async def list(self, call: Call) -> Answer:
        """Those of an organisation."""
        found = [experiment(each) for each in await self._jobs.list_experiments(call.org)]
        return Answer(_cut("experiments", found, call))

    async def create(self, call: Call) -> Answer:
        """A new one."""
        wish = experiment_wish(call.fields())
        return Answer(experiment(await self._jobs.create_experiment(call.org, call.user_id, wish)))

    async def show(self, call: Call) -> Answer:
        """One."""
        experiment_id = uuid_of(call.ids[0], "Experiment")
        return Answer(experiment(await self._jobs.get_experiment(call.org, experiment_id)))

    async def change(self, call: Call) -> Answer:
        """PUT and PATCH: what is not said stays."""
        fields = call.fields()
        experiment_id = uuid_of(call.ids[0], "Experiment")
        arch = fields.text("network_arch", most=_MOST_NAME)
        if arch is not None and arch != (await self._jobs.get_experiment(call.org, experiment_id)).network_arch:
            raise InvalidArgument("network_arch of an experiment cannot be changed: make a new experiment")
        workspace = fields.uuid("Workspace", "workspace")
        change = ExperimentChange(
            fields.text("name", most=_MOST_NAME),
            fields.text("description"),
            workspace,
            fields.object("docker_env_vars"),
            fields.rest(*_EXPERIMENT, *_OURS),
        )
        return Answer(experiment(await self._jobs.update_experiment(call.org, experiment_id, change)))

    async def base(self, call: Call) -> Answer:
        """Models of NVIDIA's that one may begin with. There are none here; clients ask all the same."""
        return Answer(_cut("experiments", [], call))

    async def delete(self, call: Call) -> Answer:
        """Remove one, with its finished jobs."""
        experiment_id = uuid_of(call.ids[0], "Experiment")
        return Answer(experiment(await self._jobs.delete_experiment(call.org, experiment_id)))


def experiment_wish(fields: Fields, *more: str) -> ExperimentWish:
    """What is said of an experiment; `more` are fields that are not its own."""
    arch = fields.text("network_arch", most=_MOST_NAME)
    if not arch:
        raise InvalidArgument('network_arch is missing: name the kind of model, such as "cosmos-rl"')
    return ExperimentWish(
        arch,
        fields.text("name", most=_MOST_NAME) or "",
        fields.text("description") or "",
        fields.uuid("Workspace", "workspace") or "",
        fields.object("docker_env_vars") or {},
        fields.rest(*_EXPERIMENT, *more),
    )


def _workspace_wish(fields: Fields, new: bool) -> WorkspaceWish:
    kind = fields.text("cloud_type", most=_MOST_NAME)
    if new and not kind:
        raise InvalidArgument("cloud_type is missing: aws, azure, seaweedfs, huggingface or self_hosted")
    return WorkspaceWish(
        fields.text("name", most=_MOST_NAME),
        kind,
        fields.object("cloud_specific_details"),
        fields.flag("shared"),
        fields.text("version", most=64),
        force_create=bool(fields.flag("force_create")),
    )


def _id(call: Call) -> str:
    return uuid_of(call.ids[0], "Workspace")


def _cut(name: str, found: list[dict[str, Any]], call: Call) -> dict[str, Any]:
    query = call.query()
    wanted = query.get("name")
    if wanted is not None:
        found = [each for each in found if each["name"] == wanted]
    skip, size = number_of(query, "skip") or 0, number_of(query, "size")
    return page(name, found[skip : None if size is None else skip + size], skip, size, len(found))
