# SPDX-License-Identifier: Apache-2.0
"""What is kept, as plain data: made by `store` from rows, given out by `service`. None holds a secret.

Times are seconds since 1970 (UTC); `iso` writes them.
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
"""The action of a job that is a running service."""
BATCH = "inference"
"""The action of a job that runs a model once over many items."""

MOVES: Mapping[str, frozenset[str]] = {
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
"""From each status, those that may follow. What is final stays."""


def iso(wall: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Organisation:
    """Whose everything is."""

    name: str
    created_on: float


@dataclass(frozen=True, slots=True)
class Workspace:
    """A bucket of a cloud, without its keys."""

    id: str
    org: str
    user_id: str
    name: str
    shared: bool
    version: str
    cloud_type: str
    bucket: str
    """"" where the kind has none."""
    created_on: float
    last_modified: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """What jobs belong to."""

    id: str
    org: str
    user_id: str
    name: str
    description: str
    network_arch: str
    workspace: str
    """An id; "" for none."""
    details: Mapping[str, Any]
    """The rest that was said: checkpoint_choose_method, checkpoint_epoch_number, tags, ..."""
    created_on: float
    last_modified: float


class Job(NamedTuple):
    """One job. A tuple, since a list may have ten thousand of them."""

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
    """Why it has this status."""
    name: str
    description: str
    network_arch: str
    num_gpu: int
    checkpoint: str
    """Of a registered model: where it lies; "" for results/{id} in the workspace's bucket."""
    specs_json: str
    details_json: str
    place: str
    """Of a service: the machine or cluster it was started on."""
    created_on: float
    last_modified: float
    stopped_on: float | None
    """Of a service: when it was stopped for good. Its id answers no more."""
    version: int
    """Counts changes, so that two gateways do not overwrite each other's."""

    @property
    def specs(self) -> dict[str, Any]:
        """What the job was given."""
        found: dict[str, Any] = json.loads(self.specs_json)
        return found

    @property
    def details(self) -> dict[str, Any]:
        """What came of it: model_path, initialization_error, model_load_error, handle, progress, ..."""
        found: dict[str, Any] = json.loads(self.details_json)
        return found

    @property
    def is_service(self) -> bool:
        """Whether it is an inference microservice."""
        return self.action == SERVICE

    @property
    def is_final(self) -> bool:
        """Whether its status will never change."""
        return self.status in FINAL


@dataclass(frozen=True, slots=True)
class JobPage:
    """Part of a list, newest first."""

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
    """A user's id, or the gateway that saw it."""


# What callers want made.


@dataclass(frozen=True, slots=True)
class WorkspaceWish:
    """A workspace to be made, or changes to one: None leaves a field as it is (or takes the default)."""

    name: str | None = None
    cloud_type: str | None = None
    cloud_specific_details: Mapping[str, Any] | None = field(default=None, repr=False)
    shared: bool | None = None
    version: str | None = None
    force_create: bool = False
    """Make another although the same is there (v2)."""


@dataclass(frozen=True, slots=True)
class ExperimentWish:
    """An experiment to be made."""

    network_arch: str
    name: str = ""
    description: str = ""
    workspace: str = ""
    docker_env_vars: Mapping[str, Any] = field(default_factory=dict, repr=False)
    details: Mapping[str, Any] = field(default_factory=dict)
    """checkpoint_choose_method, checkpoint_epoch_number, tags, ...: kept and given back as they are."""


@dataclass(frozen=True, slots=True)
class ExperimentChange:
    """Changes to an experiment: None leaves a field as it is."""

    name: str | None = None
    description: str | None = None
    workspace: str | None = None
    docker_env_vars: Mapping[str, Any] | None = field(default=None, repr=False)
    details: Mapping[str, Any] = field(default_factory=dict)
    """Each by itself; null takes one away."""


@dataclass(frozen=True, slots=True)
class JobWish:
    """A job to be made: a completed training to be registered, or work for a runner (`inference`)."""

    action: str
    parent_id: str = ""
    name: str = ""
    description: str = ""
    num_gpu: int = -1
    specs: Mapping[str, Any] = field(default_factory=dict)
    backend_details: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    """Where a trained model lies: a path or a URL. None: under results/{id} in the workspace's bucket."""
    network_arch: str = ""
    """Default: the experiment's."""
    id: str = ""
    """Of a job of another TAO API, to find its results/{id}; default: a new one."""


# What is known of a running service.


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to send an inference request, or what to answer instead."""

    job: Job
    url: str | None
    """"http://host:port"; None if there is nobody to ask."""
    state: Literal["running", "initializing", "failed"]
    error: str = ""
    """Of a failed one: "Server initialization failed: ...", "Model failed to load: ...", or why it ended."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The record, what the service says of itself, and what the platform says of it."""

    job: Job
    body: dict[str, Any]
    """The union of the field sets of facts 3.10, with JSON nulls: what GET .../status answers."""
