# SPDX-License-Identifier: Apache-2.0
"""`headrace bench --service`: where an InferenceService answers, and what the report is to say of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.core.errors import FailedPrecondition, NotFound
from headrace.fleet.client.kinds import SERVICE, kind_named
from headrace.fleet.client.summaries import summary
from headrace.fleet.planning.site import CLUSTER_DOMAIN

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Fleet


async def service_at(fleet: Fleet, namespace: str, name: str, url: str) -> tuple[str, tuple[str, ...]]:
    """The address to ask, `url` where one is told, and NAME=VALUE for the report. Raises what tells what to do."""
    bare, space = name.rpartition("/")[2], namespace or fleet.namespace
    flag = fleet.commands.flag
    found = await fleet.get(kind_named(SERVICE), space, bare)
    if found is None:
        raise NotFound(
            f"there is no InferenceService {bare} in namespace {space}: `headrace get isvc -A{flag}` lists all"
        )
    told = summary(found)
    if told.ready != "True" or not told.url:
        why = told.reason or "it has no URL yet"
        raise FailedPrecondition(
            f"{bare} is not ready: {why}; look at `headrace describe isvc {bare} -n {space}{flag}`"
        )
    about = {
        "service": f"{space}/{bare}",
        "served model": told.model,
        "runtime": told.runtime,
        "mode": told.mode,
        "replicas": f"{told.ready_replicas} of {told.replicas} ready",
    }
    return url or _reachable(fleet, space, told.url), tuple(f"{key}={value}" for key, value in about.items() if value)


def _reachable(fleet: Fleet, namespace: str, url: str) -> str:
    host = urlsplit(url).hostname or ""
    if not host.endswith(CLUSTER_DOMAIN) or "KUBERNETES_SERVICE_HOST" in os.environ:
        return url
    said = {"namespace": namespace, "service": host.partition(".")[0], "port": urlsplit(url).port or 80}
    forward = fleet.commands.forward.format(**said)
    raise FailedPrecondition(
        f"{url} answers inside the cluster alone: run `{forward}`, and add --url http://localhost:8080"
    )
