# SPDX-License-Identifier: Apache-2.0
"""What a service is started with, read and checked. Made by `launching`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.limits import MIB, Limits
from headrace.jobs.microservice.profiles import GENERAL, Profile
from headrace.jobs.microservice.secrets import Secrets
from headrace.models.media.settings import MediaSettings
from headrace.models.storage.credentials import CloudCredentials
from headrace.net.sockets import Address

BODY_BYTES = 704 * MIB
"""One request: a video of 512 MiB as a data: URL, and some."""


@dataclass(frozen=True, slots=True)
class CallbackSettings:
    """Where TAO's API hears of a service that wants to be deleted."""

    url: str
    admin_key: str = field(repr=False)
    experiment_number: str = "0"
    timeout_seconds: float = 10.0
    tries: int = 3
    pause_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class IdleSettings:
    """When a service that nobody uses is to go."""

    timeout_minutes: float = 30.0
    """Without an inference request since the model was loaded."""
    enabled: bool = True
    """False: `--disable_auto_deletion`."""
    exits: bool = False
    """Whether the process ends then; else it asks by the callback, where there is one, and stays up."""
    period_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """What was said of a pipeline plug-in."""

    named: str = ""
    model_key: str = ""
    output_dir: Path | None = None
    context_parallel_size: int = 1
    options: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MicroserviceSettings:
    """All of it."""

    job_id: str
    model_path: str
    """As it was written; "" only where a pipeline has a key for its weights."""
    address: Address
    network_arch: str = ""
    profile: Profile = GENERAL
    specs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Everything that the job says of its model."""
    folder: Path = Path("/tmp/tao_models")  # noqa: S108  # its owner is checked
    """Where models are downloaded to and the state file lies."""
    task: str = ""
    """The kind of model, where its files do not tell."""
    base_model_path: str = ""
    """The model that a LoRA adapter at `model_path` is for."""
    credentials: CloudCredentials | None = None
    """Of the workspace (REST mode); None for a service of the launcher, which has no cloud."""
    idle: IdleSettings = IdleSettings()
    callback: CallbackSettings | None = None
    pipeline: PipelineChoice = PipelineChoice()
    media: MediaSettings = field(default_factory=MediaSettings)
    limits: Limits = field(default_factory=lambda: Limits(body_bytes=BODY_BYTES))
    grace_seconds: float = 30.0
    pid_file: Path | None = None
    access_log: bool = False
    secrets: Secrets = field(default_factory=Secrets)
