# SPDX-License-Identifier: Apache-2.0
"""What a service's objects are called and by which labels they are found. Pure; used by every module of this room."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.platforms.kubernetes.settings import KubernetesSettings

MANAGER = "headrace"
"""The field manager of all that is applied."""
MANAGED_BY = "app.kubernetes.io/managed-by"
JOB_LABEL = "headrace-job"
"""On every object of a service: its job id."""
START_LABEL = "headrace-start"
"""On pods: which start made them. No later apply may change it, so that of two starts of one job the API server lets one
through."""
JOB_ANNOTATION = "tao-job-id"
CONTAINER = {"job": "tao", "statefulset": "ims-container"}

_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


def check_id(job_id: str) -> str:
    """The id, if it is a UUID in its one spelling: it becomes part of names and selectors."""
    try:
        if str(uuid.UUID(job_id)) == job_id:
            return job_id
    except ValueError:
        pass
    raise InvalidArgument("a service's job id is a UUID, written in lower case")


def workload_name(job_id: str, settings: KubernetesSettings) -> str:
    """`tao-job-...` or `ims-...`."""
    return f"tao-job-{job_id}" if settings.workload == "job" else f"ims-{job_id}"


def service_name(job_id: str, settings: KubernetesSettings) -> str:
    """A Job's Service is called like the Job, since whoever stops it by hand knows that name alone."""
    return f"tao-job-{job_id}" if settings.workload == "job" else f"ims-svc-{job_id}"


def secret_name(job_id: str) -> str:
    """Of the variables that nobody may see."""
    return f"tao-creds-{job_id}"


def ours(job_id: str | None = None) -> dict[str, str | None]:
    """The labels of everything that this driver made, or of one service."""
    return {MANAGED_BY: MANAGER, JOB_LABEL: job_id}


def labels(job_id: str, settings: KubernetesSettings, given: Mapping[str, str]) -> dict[str, str]:
    """Labels of every object of a service; of those given, the ones whose values can be labels at all."""
    name = workload_name(job_id, settings)
    made = {key: value for key, value in given.items() if _LABEL_VALUE.fullmatch(value)}
    if settings.workload == "job":
        made |= {"tao-job": name, "tao-sdk-job-id": job_id}
    else:
        made |= {"app": "ims", "job-id": job_id, "job": job_id, "statefulset": name}
        made |= {"service-type": "long-lived", "auto-cleanup": "false"}
    return {**made, MANAGED_BY: MANAGER, JOB_LABEL: job_id}


def notes(job_id: str, given: Mapping[str, str]) -> dict[str, str]:
    """The job's id, and every given label as it was given: an annotation may be any text."""
    for key in given:
        if not _LABEL_NAME.fullmatch(key):
            raise InvalidArgument(f"label {key!a}: its name has letters, digits and -_. alone, 63 at most")
    return {JOB_ANNOTATION: job_id, **{f"headrace/{key}": value for key, value in given.items()}}


def selector(job_id: str, settings: KubernetesSettings) -> dict[str, str]:
    """What a Service selects its pod by; the Job controller puts `job-name` on its pods."""
    name = workload_name(job_id, settings)
    return {"job-name": name} if settings.workload == "job" else {"statefulset": name}


def job_of(thing: Mapping[str, Any]) -> str:
    """Whose object it is."""
    return str((thing["metadata"].get("labels") or {}).get(JOB_LABEL, ""))
