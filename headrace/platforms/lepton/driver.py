# SPDX-License-Identifier: Apache-2.0
"""The driver `lepton`: a service is an endpoint with one replica in a DGX Cloud Lepton workspace.

Everything is found again by names that `deployments` derives from the job id; nothing is stored here. Secrets are created
first and removed last, so that `list_services` reports what an interrupted start has left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from headrace.core.errors import AlreadyExists, HeadraceError, Unavailable
from headrace.platforms.contract import Check, Handle, LaunchSpec, PlatformStatus, check_job_id, check_spec
from headrace.platforms.lepton import deployments
from headrace.platforms.lepton.api_client import LeptonClient
from headrace.platforms.lepton.deployments import (
    deployment_body,
    deployment_name,
    job_of_deployment,
    job_of_secret,
    secret_bodies,
)
from headrace.platforms.lepton.settings import TOKEN, WORKSPACE, LeptonSettings

log = logging.getLogger("headrace.launch")

_LOG_DAYS = 3


class LeptonDriver:
    """Implements `contract.Driver`."""

    name = "lepton"

    def __init__(self, settings: LeptonSettings) -> None:
        self._settings = settings
        self._api = LeptonClient(settings)
        self.place = f"lepton:{urlsplit(settings.gateway).hostname}:{settings.workspace}"

    async def preflight(self) -> list[Check]:
        """Check the workspace, the token and the image pull secret."""
        settings = self._settings
        hint = "the workspace's dashboard shows it under Settings"
        checks = [
            Check(WORKSPACE, bool(settings.workspace), "SET" if settings.workspace else f"UNSET: {hint}"),
            Check(TOKEN, bool(settings.token), "SET" if settings.token else f"UNSET: {hint}; make a token and set it"),
        ]
        if not all(check.passed for check in checks):
            return checks
        try:
            await self._api.get("/workspace")
            checks.append(Check("workspace", True, f"{settings.workspace} answers at {settings.gateway}"))
            if settings.image_pull_secret:
                checks.append(await self._pull_secret())
        except HeadraceError as error:
            checks.append(Check("workspace", False, error.message))
        return checks

    async def start(self, spec: LaunchSpec) -> Handle:
        """Create the secrets and the deployment."""
        check_spec(spec)
        body = deployment_body(spec, self._settings)
        before = AlreadyExists(f"a service of job {spec.job_id} was started in this workspace before")
        if await self._deployment(spec.job_id) is not None or spec.job_id in await self._secrets():
            raise before
        secrets = secret_bodies(spec)
        if secrets and (await self._api.post("/usersecrets", secrets, 409)).status == 409:
            raise before
        try:
            answer = await self._api.post("/deployments", body, 409)
        except HeadraceError:
            # Refused: nothing was created. Without an answer it may have been; `list_services` reports it.
            if await self._deployment(spec.job_id) is None:
                await self._remove_secrets(spec.job_id)
            raise
        if answer.status == 409:
            raise before
        created = answer.body if isinstance(answer.body, Mapping) else {}
        data = {
            "platform_job_id": deployments.deployment_id(created) or deployment_name(spec.job_id),
            "workspace": self._settings.workspace,
        }
        return Handle(spec.job_id, self.name, data)

    async def status(self, handle: Handle) -> PlatformStatus:
        """Return the status of the deployment."""
        deployment = await self._deployment(check_job_id(handle.job_id))
        if deployment is None:
            return deployments.never_started() if handle.job_id in await self._secrets() else PlatformStatus("gone")
        return await self._observed(deployment)

    async def logs(self, handle: Handle, tail: int) -> str:
        """Return the last lines of the deployment's log."""
        deployment = await self._deployment(check_job_id(handle.job_id))
        if deployment is None or tail <= 0:
            return ""
        now = time.time_ns()
        query = {
            "deployment": deployments.deployment_id(deployment),
            "start": now - _LOG_DAYS * 86_400 * 10**9,
            "end": now,
            "limit": min(tail, 10_000),
            "direction": "backward",
        }
        answer = await self._api.get("/logs?" + urlencode(query), 404)
        return deployments.log_lines(answer.body, tail)

    async def endpoint(self, handle: Handle) -> str | None:
        """Return the URL of the deployment."""
        deployment = await self._deployment(check_job_id(handle.job_id))
        if deployment is None or (await self._observed(deployment)).phase == "ended":
            return None
        return deployments.endpoint_url(deployment)

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """Delete the deployment and its secrets. The platform has its own grace period."""
        job_id = check_job_id(handle.job_id)
        limit = time.monotonic() + self._settings.stop_seconds
        while (deployment := await self._deployment(job_id)) is not None:
            if deployments.deployment_state(deployment) != "Deleting":
                await self._api.delete(f"/deployments/{deployments.deployment_id(deployment)}", 404, 409)
            elif time.monotonic() > limit:
                raise Unavailable(
                    f"Lepton has not removed {deployments.deployment_id(deployment)} yet; try again later"
                )
            await asyncio.sleep(self._settings.poll_seconds)
        await self._remove_secrets(job_id)

    async def list_services(self) -> dict[str, PlatformStatus]:
        """Return the status of all deployments and interrupted starts."""
        listed = (await self._api.get("/deployments")).body
        deployments_by_job: dict[str, Mapping[str, Any]] = {}
        for deployment in listed if isinstance(listed, list) else ():
            job_id = job_of_deployment(deployments.given_name(deployment))
            if job_id is not None:
                deployments_by_job[job_id] = deployment
        statuses = {job_id: await self._observed(deployment) for job_id, deployment in deployments_by_job.items()}
        return {job_id: deployments.never_started() for job_id in await self._secrets()} | statuses

    async def close(self) -> None:
        """Do nothing: the driver keeps nothing open."""

    async def _deployment(self, job_id: str) -> Mapping[str, Any] | None:
        answer = await self._api.get(f"/deployments/{deployment_name(job_id)}", 404)
        return answer.body if answer.status != 404 and isinstance(answer.body, Mapping) else None

    async def _observed(self, deployment: Mapping[str, Any]) -> PlatformStatus:
        if not deployments.needs_details(deployment):
            return deployments.deployment_status(deployment)
        path = f"/deployments/{deployments.deployment_id(deployment)}"
        terminations = (await self._api.get(f"{path}/termination", 404)).body
        issues = (await self._api.get(f"{path}/readiness", 404)).body
        return deployments.deployment_status(
            deployment,
            terminations if isinstance(terminations, Mapping) else None,
            issues if isinstance(issues, Mapping) else None,
        )

    async def _secrets(self) -> dict[str, list[str]]:
        """Return the names of the driver's secrets in the workspace, by job."""
        listed = (await self._api.get("/usersecrets")).body
        secrets: dict[str, list[str]] = {}
        for item in listed if isinstance(listed, list) else ():
            name = str(item.get("name") if isinstance(item, Mapping) else item)
            job_id = job_of_secret(name)
            if job_id is not None:
                secrets.setdefault(job_id, []).append(name)
        return secrets

    async def _remove_secrets(self, job_id: str) -> None:
        for name in (await self._secrets()).get(job_id, ()):
            await self._api.delete(f"/usersecrets/{name}", 404)

    async def _pull_secret(self) -> Check:
        name = self._settings.image_pull_secret
        listed = (await self._api.get("/imagepullsecrets")).body
        names = {deployments.deployment_id(item) for item in listed or () if isinstance(item, Mapping)}
        names |= {deployments.given_name(item) for item in listed or () if isinstance(item, Mapping)}
        message = "exists" if name in names else "is not in the workspace: create it under Settings, Registries"
        return Check("image pull secret", name in names, f"{name} {message}")
