# SPDX-License-Identifier: Apache-2.0
"""The driver `lepton`: a service is an endpoint of one replica in a DGX Cloud Lepton workspace.

Everything is found again by the names that `bodies` makes of a job's id; nothing is kept here. Secrets are made first and
removed last, so that what a cut-short start leaves is told by `found`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from headrace.core.errors import AlreadyExists, HeadraceError, Unavailable
from headrace.platforms.checking import check_job_id, check_spec
from headrace.platforms.contract import Check, Handle, LaunchSpec, Observed
from headrace.platforms.lepton import states
from headrace.platforms.lepton.api import LeptonApi
from headrace.platforms.lepton.bodies import deployment_of, job_of, job_of_secret, name_of, secrets_of
from headrace.platforms.lepton.settings import TOKEN, WORKSPACE, LeptonSettings

log = logging.getLogger("headrace.launch")

_LOG_DAYS = 3


class LeptonDriver:
    """See `contract.Driver`."""

    name = "lepton"

    def __init__(self, settings: LeptonSettings) -> None:
        self._settings = settings
        self._api = LeptonApi(settings)
        self.place = f"lepton:{urlsplit(settings.gateway).hostname}:{settings.workspace}"

    async def preflight(self) -> list[Check]:
        """See `contract.Driver.preflight`."""
        settings = self._settings
        how = "the workspace's dashboard shows it under Settings"
        checks = [
            Check(WORKSPACE, bool(settings.workspace), "SET" if settings.workspace else f"UNSET: {how}"),
            Check(TOKEN, bool(settings.token), "SET" if settings.token else f"UNSET: {how}; make a token and set it"),
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
        """See `contract.Driver.start`."""
        check_spec(spec)
        body = deployment_of(spec, self._settings)
        before = AlreadyExists(f"a service of job {spec.job_id} was started in this workspace before")
        if await self._deployment(spec.job_id) is not None or spec.job_id in await self._secrets():
            raise before
        secrets = secrets_of(spec)
        if secrets and (await self._api.post("/usersecrets", secrets, 409)).status == 409:
            raise before
        try:
            answer = await self._api.post("/deployments", body, 409)
        except HeadraceError:
            # Refused: then nothing was made. Where nobody answered it may have been, and `found` tells.
            if await self._deployment(spec.job_id) is None:
                await self._remove_secrets(spec.job_id)
            raise
        if answer.status == 409:
            raise before
        made = answer.body if isinstance(answer.body, Mapping) else {}
        data = {"platform_job_id": states.id_of(made) or name_of(spec.job_id), "workspace": self._settings.workspace}
        return Handle(spec.job_id, self.name, data)

    async def status(self, handle: Handle) -> Observed:
        """See `contract.Driver.status`."""
        deployment = await self._deployment(check_job_id(handle.job_id))
        if deployment is None:
            return states.never_started() if handle.job_id in await self._secrets() else Observed("gone")
        return await self._observed(deployment)

    async def logs(self, handle: Handle, tail: int) -> str:
        """See `contract.Driver.logs`."""
        deployment = await self._deployment(check_job_id(handle.job_id))
        if deployment is None or tail <= 0:
            return ""
        now = time.time_ns()
        asked = {
            "deployment": states.id_of(deployment),
            "start": now - _LOG_DAYS * 86_400 * 10**9,
            "end": now,
            "limit": min(tail, 10_000),
            "direction": "backward",
        }
        answer = await self._api.get("/logs?" + urlencode(asked), 404)
        return states.lines_of(answer.body, tail)

    async def endpoint(self, handle: Handle) -> str | None:
        """See `contract.Driver.endpoint`."""
        deployment = await self._deployment(check_job_id(handle.job_id))
        if deployment is None or (await self._observed(deployment)).phase == "ended":
            return None
        return states.endpoint_of(deployment)

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """See `contract.Driver.stop`. The platform has its own grace."""
        job_id = check_job_id(handle.job_id)
        limit = time.monotonic() + self._settings.stop_seconds
        while (deployment := await self._deployment(job_id)) is not None:
            if states.state_of(deployment) != "Deleting":
                await self._api.delete(f"/deployments/{states.id_of(deployment)}", 404, 409)
            elif time.monotonic() > limit:
                raise Unavailable(f"Lepton has not taken {states.id_of(deployment)} down yet; try again later")
            await asyncio.sleep(self._settings.poll_seconds)
        await self._remove_secrets(job_id)

    async def found(self) -> dict[str, Observed]:
        """See `contract.Driver.found`."""
        listed = (await self._api.get("/deployments")).body
        ours: dict[str, Mapping[str, Any]] = {}
        for each in listed if isinstance(listed, list) else ():
            job_id = job_of(states.name_told(each))
            if job_id is not None:
                ours[job_id] = each
        seen = {job_id: await self._observed(each) for job_id, each in ours.items()}
        return {job_id: states.never_started() for job_id in await self._secrets()} | seen

    async def close(self) -> None:
        """See `contract.Driver.close`. There is nothing that stays open."""

    async def _deployment(self, job_id: str) -> Mapping[str, Any] | None:
        answer = await self._api.get(f"/deployments/{name_of(job_id)}", 404)
        return answer.body if answer.status != 404 and isinstance(answer.body, Mapping) else None

    async def _observed(self, deployment: Mapping[str, Any]) -> Observed:
        if not states.needs_more(deployment):
            return states.observed(deployment)
        path = f"/deployments/{states.id_of(deployment)}"
        terminations = (await self._api.get(f"{path}/termination", 404)).body
        issues = (await self._api.get(f"{path}/readiness", 404)).body
        return states.observed(
            deployment,
            terminations if isinstance(terminations, Mapping) else None,
            issues if isinstance(issues, Mapping) else None,
        )

    async def _secrets(self) -> dict[str, list[str]]:
        """Names of the workspace's secrets that are ours, by job."""
        listed = (await self._api.get("/usersecrets")).body
        found: dict[str, list[str]] = {}
        for each in listed if isinstance(listed, list) else ():
            name = str(each.get("name") if isinstance(each, Mapping) else each)
            job_id = job_of_secret(name)
            if job_id is not None:
                found.setdefault(job_id, []).append(name)
        return found

    async def _remove_secrets(self, job_id: str) -> None:
        for name in (await self._secrets()).get(job_id, ()):
            await self._api.delete(f"/usersecrets/{name}", 404)

    async def _pull_secret(self) -> Check:
        wanted = self._settings.image_pull_secret
        listed = (await self._api.get("/imagepullsecrets")).body
        names = {states.id_of(each) for each in listed or () if isinstance(each, Mapping)}
        names |= {states.name_told(each) for each in listed or () if isinstance(each, Mapping)}
        told = "is there" if wanted in names else "is not in the workspace: make it under Settings, Registries"
        return Check("image pull secret", wanted in names, f"{wanted} {told}")
