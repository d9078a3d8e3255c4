# SPDX-License-Identifier: Apache-2.0
"""The status of a service as it is answered: the record's words, the service's and the platform's in one object.

Called by `services`. Every field is always there; the two errors are null when all is well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.jobs.records import Job
from headrace.platforms.contract import Observed

_BEFORE = {
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


def as_it_ends(job: Job) -> Job:
    """A service that is being ended because it failed, as its record will have it; any other as it is.

    Whoever waits for the model must hear of the failure at every moment from then on.
    """
    end = job.details.get("end")
    if job.status != "Canceling" or not isinstance(end, Mapping) or end.get("status") != "Error":
        return job
    details = {**job.details, **end.get("details", {})}
    return job._replace(status="Error", reason=str(end.get("reason", "")), details_json=json.dumps(details))


def live_body(job: Job, observed: Observed, told: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of a service that runs, or is about to; `told` is what it answered, if it did."""
    word = "Terminating" if job.status == "Canceling" else observed.word
    if observed.phase in ("gone", "ended") and job.status == "Pending":
        word = "Pending"
    platform = {"job_id": job.id, "pod_name": observed.name or f"ims-{job.id}", "pod_status": word}
    body = {**_BEFORE, "network_arch": job.network_arch, **(told or {}), **platform, "job_status": job.status}
    if body["model_load_error"] or body["initialization_error"]:
        body["status"] = "error"  # as `failed_body` says it when the service has ended
    return body


def failed_body(job: Job, observed: Observed) -> dict[str, Any]:
    """Of one that has ended with an error."""
    details = job.details
    load, begin = details.get("model_load_error"), details.get("initialization_error")
    if load is None and begin is None:
        begin = job.reason  # a client that waits for the model looks at these two fields alone
    return {
        **_BEFORE,
        "server_initializing": False,
        "initialization_error": begin,
        "model_load_error": load,
        "status": "error",
        "model_state": "error",
        "network_arch": job.network_arch,
        "job_id": job.id,
        "pod_name": observed.name or f"ims-{job.id}",
        "pod_status": "Failed",
        "job_status": job.status,
    }


def failure_of(job: Job) -> str:
    """Why an ended service cannot answer, as it would have said it itself."""
    details = job.details
    if details.get("initialization_error"):
        return f"Server initialization failed: {details['initialization_error']}"
    if details.get("model_load_error"):
        return f"Model failed to load: {details['model_load_error']}"
    return job.reason
