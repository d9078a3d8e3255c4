# SPDX-License-Identifier: Apache-2.0
"""The scalers of a router: through the Kubernetes API server, or through the fleet daemon of this machine.

`programs.router` imports this module only if the router has activation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.fleet.local.api_client import LocalFleet
from headrace.fleet.router.scale_targets import ReplicaCounts, ScalerError
from headrace.fleet.router.settings import LocalService, ScaleTarget
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable, connect
from headrace.platforms.kubernetes_client.objects import Document, Resource, ServedResource, get_int

log = logging.getLogger("headrace.router")

_FIELD_MANAGER = "headrace-router"
_CALL_SECONDS = 10.0
_WATCH_SECONDS = 60
_REFUSALS = {
    401: "the API server rejected our credentials: check the router's service account",
    403: "the API server denied access: bind a Role with get, list and watch of it, and patch of its scale",
    404: "the API server has no such object: check whether it was deleted, and whether the kind is installed",
}
_NONE = ReplicaCounts(0, 0)
_UNKNOWN = ReplicaCounts(-1, -1)


class KubernetesScaler:
    """Watches workloads and patches their `scale` subresource.

    Needs `get`, `list` and `watch` of the workloads and `patch` of their `scale`, for these by name.
    """

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def replicas(self, target: ScaleTarget) -> ReplicaCounts:
        """Return the current counts."""
        return (await self._list(target))[0]

    async def scale(self, target: ScaleTarget, replicas: int) -> None:
        """Set the desired replicas."""
        with _scaler_errors():
            await self._api.patch(
                _served(target), target.namespace, target.name, {"spec": {"replicas": replicas}}, "scale"
            )

    async def watch(self, target: ScaleTarget) -> AsyncIterator[ReplicaCounts]:
        """Yield the current counts and every change, until the API server ends the watch."""
        objects, version = await self._list(target)
        yield objects
        changes = self._api.watch(
            _served(target), version, "", target.namespace, _name_selector(target), seconds=_WATCH_SECONDS
        )
        with _scaler_errors():
            async with aclosing(changes) as events:  # type: ignore[type-var]
                try:
                    async for change, workload in events:
                        if change != "BOOKMARK":
                            yield parse_counts(workload) if change != "DELETED" else _NONE
                except ApiError as error:
                    if error.code != 410:  # Gone: the resource version is too old; start again
                        raise

    async def close(self) -> None:
        """Close the client."""
        await self._api.close()

    async def _list(self, target: ScaleTarget) -> tuple[ReplicaCounts, str]:
        with _scaler_errors():
            workloads, version = await self._api.list(_served(target), "", target.namespace, _name_selector(target))
        return (parse_counts(workloads[0]) if workloads else _NONE), version


def connect_kubernetes(kubeconfig: str = "") -> KubernetesScaler:
    """Return a scaler for the cluster that we run in, or for that of a kubeconfig. Raises FailedPrecondition."""
    return KubernetesScaler(connect(kubeconfig, timeout=_CALL_SECONDS, field_manager=_FIELD_MANAGER))


def _served(target: ScaleTarget) -> ServedResource:
    group, _, version = target.api_version.rpartition("/")
    return ServedResource(Resource(group, (version,), target.kind, f"{target.kind.lower()}s"), version)


def _name_selector(target: ScaleTarget) -> str:
    # A Role for one name allows list and watch only with this selector.
    return f"metadata.name={target.name}"


def parse_counts(workload: Document) -> ReplicaCounts:
    """Return the replica counts of a workload."""
    desired = get_int(workload, "spec", "replicas")
    return ReplicaCounts(1 if desired is None else desired, get_int(workload, "status", "readyReplicas") or 0)


@contextmanager
def _scaler_errors() -> Iterator[None]:
    """Raise ScalerError for a call that fails."""
    try:
        yield
    except ApiError as error:
        log.info("The API server answered %d: %s", error.code, error.message[:500])
        text = _REFUSALS.get(error.code, f"the API server answered {error.code}; see the router's log")
        raise ScalerError(text) from None
    except Unreachable as error:
        log.debug("The API server cannot be reached: %s", error)
        raise ScalerError("the API server does not answer, or sent an invalid answer; retrying") from None
    except HeadraceError as error:  # the login method
        raise ScalerError(error.message) from None


class LocalScaler:
    """Scales through the socket of `headrace up`. While the daemon does not run, scaling fails and is retried."""

    def __init__(self, service: LocalService) -> None:
        self._fleet = LocalFleet(Path(service.folder))
        self._service = service.service
        self._reports: set[asyncio.Task[None]] = set()

    async def replicas(self, target: ScaleTarget) -> ReplicaCounts:
        """Return the current counts."""
        return await self._counts_after(target, _UNKNOWN)

    async def scale(self, target: ScaleTarget, replicas: int) -> None:
        """Set the desired replicas."""
        try:
            reason = "requests at its router" if replicas else "no requests at its router"
            await self._fleet.scale(target.namespace, self._service, target.name, replicas, reason)
        except HeadraceError as error:
            raise ScalerError(error.message) from None

    async def watch(self, target: ScaleTarget) -> AsyncIterator[ReplicaCounts]:
        """Long-poll the daemon, which answers when the counts change."""
        last = _UNKNOWN
        while True:
            counts = await self._counts_after(target, last)
            if counts != last:
                last = counts
                yield counts

    async def close(self) -> None:
        """Cancel reports; no connection is open between requests."""
        for task in self._reports:
            task.cancel()
        await asyncio.gather(*self._reports, return_exceptions=True)

    def report(self, target: ScaleTarget, parts: Mapping[str, float]) -> None:
        """Send the parts of a cold start to the daemon, for `headrace describe`. Failures are only logged."""
        task = asyncio.ensure_future(self._send_report(target, parts))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _send_report(self, target: ScaleTarget, parts: Mapping[str, float]) -> None:
        try:
            await self._fleet.report_cold_start(target.namespace, self._service, parts)
        except HeadraceError as error:
            log.info("Could not report a cold start: %s", error.message)

    async def _counts_after(self, target: ScaleTarget, last: ReplicaCounts) -> ReplicaCounts:
        known_counts = {"wanted": last.desired, "ready": last.ready}
        try:
            reply = await self._fleet.replicas(target.namespace, self._service, target.name, known_counts)
        except HeadraceError as error:
            raise ScalerError(error.message) from None
        return ReplicaCounts(reply["wanted"], reply["ready"], reply.get("started", 0.0), reply.get("found", 0.0))
