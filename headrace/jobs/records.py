# SPDX-License-Identifier: Apache-2.0
"""Workspaces, experiments and jobs as plain data, without secrets.

Times are seconds since 1970 (UTC); `iso` formats them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

Status = Literal[
    "Pending", "Started", "Running", "Done", "Error", "Canceling", "Canceled", "Pausing", "Paused", "Resuming"
]
FINAL: frozenset[str] = frozenset({"Done", "Error", "Canceled"})
SERVICE = "inference_microservice"
"""The action of a job that is an inference microservice."""
BATCH = "inference"
"""The action of a job that runs a model once over many items."""

TRANSITIONS: Mapping[str, frozenset[str]] = {
    "Pending": frozenset({"Started", "Running", "Done", "Error", "Canceling", "Canceled", "Paused"}),
    "Started": frozenset({"Running", "Done", "Error", "Canceling", "Canceled", "Pausing"}),
    "Running": frozenset({"Done", "Error", "Canceling", "Canceled", "Pausing"}),
    "Canceling": frozenset({"Canceled", "Done", "Error"}),
    "Pausing": frozenset({"Paused", "Error", "Canceling"}),
    "Paused": frozenset({"Resuming", "Canceling", "Canceled"}),
    "Resuming": frozenset({"Started", "Running", "Error", "Canceling", "Pausing"}),
    "Done": frozenset(),
    "Error": frozenset(),
    "Canceled": frozenset(),
}
"""From each status, the statuses that may follow. Final statuses have none."""


def iso(wall: float) -> str:
    """Format seconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Organisation:
    """The owner of workspaces, experiments and jobs."""

    name: str
    created_on: float


@dataclass(frozen=True, slots=True)
class Workspace:
    """A cloud storage bucket, without its credentials."""

    id: str
    org: str
    user_id: str
    name: str
    shared: bool
    version: str
    cloud_type: str
    bucket: str
    """"" if the cloud type has none."""
    created_on: float
    last_modified: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """A group of jobs with one architecture."""

    id: str
    org: str
    user_id: str
    name: str
    description: str
    network_arch: str
    workspace: str
    """The workspace's id; "" for none."""
    details: Mapping[str, Any]
    """Other fields of the request: checkpoint_choose_method, checkpoint_epoch_number, tags, ..."""
    created_on: float
    last_modified: float


class Job(NamedTuple):
    """One job. A tuple, because a list may have ten thousand of them."""

    id: str
    org: str
    experiment_id: str
    user_id: str
    parent_id: str
    """"" for none."""
    action: str
    """`train`, `inference`, `inference_microservice`, ..."""
    status: str
    reason: str
    """Why the job has this status."""
    name: str
    description: str
    network_arch: str
    num_gpu: int
    checkpoint: str
    """Location of a registered model; "" for results/{id} in the workspace's bucket."""
    specs_json: str
    details_json: str
    place: str
    """The machine or cluster that runs the job, for services and batches."""
    created_on: float
    last_modified: float
    stopped_on: float | None
    """When a service was stopped for good; from then on its id is NotFound."""
    version: int
    """Version number, so that two gateways do not overwrite each other's changes."""

    @property
    def specs(self) -> dict[str, Any]:
        """Return the specs of the request."""
        specs: dict[str, Any] = json.loads(self.specs_json)
        return specs

    @property
    def details(self) -> dict[str, Any]:
        """Return the state of the job: model_path, initialization_error, model_load_error, handle, progress, ..."""
        details: dict[str, Any] = json.loads(self.details_json)
        return details

    @property
    def is_service(self) -> bool:
        """Return whether it is an inference microservice."""
        return self.action == SERVICE

    @property
    def is_final(self) -> bool:
        """Return whether its status can no longer change."""
        return self.status in FINAL


@dataclass(frozen=True, slots=True)
class JobPage:
    """A page of a list of jobs, newest first."""

    jobs: list[Job]
    total: int


@dataclass(frozen=True, slots=True)
class Event:
    """One change of a job."""

    job_id: str
    time: float
    status: str
    reason: str
    by: str
    """A user's id, or the name of a gateway."""


# Requests to create or change records.


@dataclass(frozen=True, slots=True)
class WorkspaceSpec:
    """A workspace to create, or changes to one: None keeps a field, or takes its default."""

    name: str | None = None
    cloud_type: str | None = None
    cloud_specific_details: Mapping[str, Any] | None = field(default=None, repr=False)
    shared: bool | None = None
    version: str | None = None
    force_create: bool = False
    """Create a new workspace even if an equal one exists (v2)."""


@dataclass(frozen=True, slots=True)
class ExperimentSpec:
    """An experiment to create."""

    network_arch: str
    name: str = ""
    description: str = ""
    workspace: str = ""
    docker_env_vars: Mapping[str, Any] = field(default_factory=dict, repr=False)
    details: Mapping[str, Any] = field(default_factory=dict)
    """checkpoint_choose_method, checkpoint_epoch_number, tags, ...: stored and returned unchanged."""


@dataclass(frozen=True, slots=True)
class ExperimentChange:
    """Changes to an experiment: None keeps a field."""

    name: str | None = None
    description: str | None = None
    workspace: str | None = None
    docker_env_vars: Mapping[str, Any] | None = field(default=None, repr=False)
    details: Mapping[str, Any] = field(default_factory=dict)
    """Merged key by key; null removes a key."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job to create: a completed training job to register, or work for a runner (`inference`)."""

    action: str
    parent_id: str = ""
    name: str = ""
    description: str = ""
    num_gpu: int = -1
    specs: Mapping[str, Any] = field(default_factory=dict)
    backend_details: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    """Path or URL of a trained model. None: results/{id} in the workspace's bucket."""
    network_arch: str = ""
    """Default: the architecture of the experiment."""
    id: str = ""
    """The id of a job of another TAO API, to find its results/{id}. Default: a new id."""


# The state of a service.


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The URL for inference requests, or why there is none."""

    job: Job
    url: str | None
    """"http://host:port"; None if the service cannot take requests."""
    state: Literal["running", "initializing", "failed"]
    error: str = ""
    """Of a failed service: "Server initialization failed: ...", "Model failed to load: ...", or why it ended."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The status of a service, from its record, the service itself and the platform."""

    job: Job
    body: dict[str, Any]
    """The response of GET .../status: all fields of TAO's clients and servers, null where unknown."""
