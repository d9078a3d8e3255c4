# SPDX-License-Identifier: Apache-2.0
"""Workspaces: made, listed, found, changed, deleted. Base of `desk`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import NotFound
from headrace.jobs.backups import BackupPlace, backup_place
from headrace.jobs.checks import MOST_NAME, check_id, check_org, check_text, check_version
from headrace.jobs.clouds import check_access, check_details
from headrace.jobs.planning import Planner
from headrace.jobs.records import Workspace, WorkspaceWish
from headrace.jobs.secrets import Vault
from headrace.jobs.settings import JobSettings
from headrace.jobs.store.store import Store


class WorkspaceDesk:
    """See `JobService`."""

    def __init__(self, store: Store, vault: Vault, settings: JobSettings, planner: Planner, clock: Clock) -> None:
        self.store = store
        self.settings = settings
        self._vault = vault
        self._clock = clock
        self._models = planner

    async def create_workspace(self, org: str, user_id: str, wish: WorkspaceWish) -> tuple[Workspace, bool]:
        """The workspace, and whether it is new: the same configuration again gives the one that is there."""
        check_org(org)
        details = dict(wish.cloud_specific_details or {})
        cloud_type = check_text(wish.cloud_type, "cloud_type", 64)
        bucket = check_details(cloud_type, details)
        await asyncio.to_thread(check_access, cloud_type, details)
        now = self._clock.wall()
        workspace = Workspace(
            str(uuid.uuid4()),
            org,
            user_id,
            check_text(wish.name, "name", MOST_NAME) or "My Workspace",
            bool(wish.shared),
            check_version(wish.version or "1.0.0"),
            cloud_type,
            bucket,
            now,
            now,
        )
        mark = self._mark(workspace, details, again=wish.force_create)
        return await self.store.workspaces.insert(workspace, self._sealed(workspace, details), mark)

    async def list_workspaces(self, org: str) -> list[Workspace]:
        """Newest first."""
        return await self.store.workspaces.all_of(check_org(org))

    async def get_workspace(self, org: str, workspace_id: str) -> Workspace:
        """Raises NotFound."""
        return (await self._workspace(org, workspace_id))[0]

    async def update_workspace(self, org: str, workspace_id: str, wish: WorkspaceWish) -> Workspace:
        """Change what the wish names; its credentials as a whole."""
        old, secret = await self._workspace(org, workspace_id)
        details: dict[str, Any] = self._vault.decrypt(secret, f"workspace {old.id}")
        if wish.cloud_specific_details is not None:
            details = dict(wish.cloud_specific_details)
        cloud_type = check_text(wish.cloud_type, "cloud_type", 64) or old.cloud_type
        bucket = check_details(cloud_type, details)
        await asyncio.to_thread(check_access, cloud_type, details)
        new = replace(
            old,
            name=check_text(wish.name, "name", MOST_NAME) or old.name,
            shared=old.shared if wish.shared is None else bool(wish.shared),
            version=check_version(wish.version or old.version),
            cloud_type=cloud_type,
            bucket=bucket,
            last_modified=self._clock.wall(),
        )
        await self.store.workspaces.update(new, self._sealed(new, details), self._mark(new, details))
        return new

    async def delete_workspace(self, org: str, workspace_id: str) -> Workspace:
        """FailedPrecondition while experiments use it."""
        workspace = await self.get_workspace(org, workspace_id)
        await self.store.workspaces.delete([workspace.id])
        return workspace

    async def delete_workspaces(self, org: str, ids: Sequence[str]) -> list[Workspace]:
        """All of them or, if one is not there or is used, none."""
        found = [await self.get_workspace(org, each) for each in dict.fromkeys(ids)]
        await self.store.workspaces.delete([workspace.id for workspace in found])
        return found

    async def backup_place(self, org: str, workspace_id: str) -> BackupPlace:
        """The bucket of a workspace, for a backup."""
        workspace, secret = await self._workspace(org, workspace_id)
        return backup_place(workspace.cloud_type, self._vault.decrypt(secret, f"workspace {workspace.id}"))

    async def _workspace(self, org: str, workspace_id: str) -> tuple[Workspace, str]:
        wanted = check_id(workspace_id, "Workspace")
        row = await self.store.workspaces.get(check_org(org), wanted)
        if row is None:
            raise NotFound(f"Workspace {wanted} not found")
        return row

    def _sealed(self, workspace: Workspace, details: Mapping[str, Any]) -> str:
        return self._vault.encrypt(details, f"workspace {workspace.id}")

    def _mark(self, workspace: Workspace, details: Mapping[str, Any], *, again: bool = False) -> str:
        told = {"name": workspace.name, "cloud_type": workspace.cloud_type, "details": dict(details)}
        return self._vault.fingerprint({**told, "again": workspace.id} if again else told)
