# SPDX-License-Identifier: Apache-2.0
"""The status of an inference microservice: poll it, build the status response, parse its status updates.

Every field of a status response is always present; the two errors are null when the service is fine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.core.limits import MIB
from headrace.jobs.records import Job
from headrace.net.http_client import request
from headrace.platforms.contract import PlatformStatus

_DEFAULTS = {
    "model_loaded": False,
    "model_loading": False,
    "server_initializing": True,
    "initialization_error": None,
    "model_load_error": None,
    "status": "initializing",
    "model_state": "initializing",
    "model_type": "",
    "server_port": None,
    "last_request_time": None,
    "idle_time_minutes": 0.0,
    "idle_timeout_minutes": None,
    "auto_deletion_enabled": True,
    "health_monitor_active": False,
    "progress": None,
}

FetchStatus = Callable[[str, float], Awaitable[Mapping[str, Any] | None]]
"""From a URL and a timeout in seconds to the service's status; None without a response."""
REQUESTED = "AUTO_DELETION_REQUESTED"
_MAX_ERROR_CHARS = 900


def with_final_state(job: Job) -> Job:
    """Return a failed service that is still being stopped as its final record; any other job unchanged.

    Clients that wait for the model must see the failure at once.
    """
    end = job.details.get("end")
    if job.status != "Canceling" or not isinstance(end, Mapping) or end.get("status") != "Error":
        return job
    details = {**job.details, **end.get("details", {})}
    return job._replace(status="Error", reason=str(end.get("reason", "")), details_json=json.dumps(details))


def running_status(job: Job, platform_status: PlatformStatus, reported: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the status of a service that runs or starts; `reported` is the service's own status, if it responded."""
    pod_status = "Terminating" if job.status == "Canceling" else platform_status.pod_phase
    if platform_status.phase in ("gone", "ended") and job.status == "Pending":
        pod_status = "Pending"
    from_platform = {"job_id": job.id, "pod_name": platform_status.name or f"ims-{job.id}", "pod_status": pod_status}
    body = {
        **_DEFAULTS,
        "network_arch": job.network_arch,
        **(reported or {}),
        **from_platform,
        "job_status": job.status,
    }
    if body["model_load_error"] or body["initialization_error"]:
        body["status"] = "error"  # as in `failed_status`
    return body


def failed_status(job: Job, platform_status: PlatformStatus) -> dict[str, Any]:
    """Return the status of a service that ended with an error."""
    details = job.details
    load_error, initialization_error = details.get("model_load_error"), details.get("initialization_error")
    if load_error is None and initialization_error is None:
        initialization_error = job.reason  # clients that wait for the model only check these two fields
    return {
        **_DEFAULTS,
        "server_initializing": False,
        "initialization_error": initialization_error,
        "model_load_error": load_error,
        "status": "error",
        "model_state": "error",
        "network_arch": job.network_arch,
        "job_id": job.id,
        "pod_name": platform_status.name or f"ims-{job.id}",
        "pod_status": "Failed",
        "job_status": job.status,
    }


def failure_message(job: Job) -> str:
    """Return why an ended service cannot respond, in the service's own words."""
    details = job.details
    if details.get("initialization_error"):
        return f"Server initialization failed: {details['initialization_error']}"
    if details.get("model_load_error"):
        return f"Model failed to load: {details['model_load_error']}"
    return job.reason


class StatusClient:
    """Polls `GET {url}/api/v1/status` in its own threads: a service that hangs must not block anything else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="headrace-status")

    async def __call__(self, url: str, seconds: float) -> Mapping[str, Any] | None:
        """Return the status of the service at a URL; None without a response."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, _get_status, url, seconds)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _get_status(url: str, seconds: float) -> Mapping[str, Any] | None:
    try:
        status = request("GET", url, "/api/v1/status", seconds=seconds, max_bytes=MIB).json()
    except (OSError, InvalidArgument):
        return None
    return status if isinstance(status, dict) else None


@dataclass(frozen=True, slots=True)
class FinalState:
    """The final status of a service that is to be stopped."""

    status: str
    """Done or Error."""
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


def parse_status_update(payload: Mapping[str, Any]) -> FinalState | None:
    """Return the final state that a `:status_update` asks for; None if it asks for nothing."""
    update = payload.get("status")
    if isinstance(update, str) and update.lstrip().startswith("{"):
        try:
            update = json.loads(update)
        except (ValueError, RecursionError):
            raise InvalidArgument("status must be a JSON object encoded as a string") from None
    if not isinstance(update, Mapping) or REQUESTED not in (update.get("status"), update.get("message")):
        return None
    reason, error = update.get("reason"), _error_text(update.get("error"))
    if reason == "initialization_failed":
        return FinalState("Error", f"Server initialization failed: {error}", {"initialization_error": error})
    if reason == "model_loading_failed":
        return FinalState("Error", f"Model failed to load: {error}", {"model_load_error": error})
    if reason == "idle_timeout_exceeded":
        minutes = update.get("idle_timeout_minutes")
        idle_minutes = f"{minutes:g}" if isinstance(minutes, int | float) and not isinstance(minutes, bool) else "some"
        return FinalState("Done", f"stopped after {idle_minutes} minutes without a request")
    raise InvalidArgument("unknown reason for an auto-deletion")


def _error_text(value: object) -> str:
    text = value if isinstance(value, str) and value else "the service gave no reason"
    return text[:_MAX_ERROR_CHARS].replace("\0", "?").encode("utf-8", "replace").decode()
