# SPDX-License-Identifier: Apache-2.0
"""Settings of a microservice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.limits import MIB, Limits
from headrace.core.nodes import NodeSettings
from headrace.jobs.microservice.profiles import GENERAL, Profile
from headrace.jobs.microservice.redaction import Secrets
from headrace.models.media.settings import MediaSettings
from headrace.models.storage.credentials import CloudCredentials
from headrace.net.sockets import Address

BODY_BYTES = 704 * MIB
"""Maximum body: a video of 512 MiB as a data: URL, with some room."""


@dataclass(frozen=True, slots=True)
class CallbackSettings:
    """Where a service asks TAO's API to delete it."""

    url: str
    admin_key: str = field(repr=False)
    experiment_number: str = "0"
    timeout_seconds: float = 10.0
    tries: int = 3
    pause_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class IdleSettings:
    """When an idle service stops or asks to be deleted."""

    timeout_minutes: float = 30.0
    """Time without an inference request since the model was loaded."""
    enabled: bool = True
    """False: `--disable_auto_deletion`."""
    exit_when_idle: bool = False
    """Whether the process exits then; otherwise it sends the callback, if there is one, and stays up."""
    period_seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """Options of a pipeline plug-in."""

    name: str = ""
    model_key: str = ""
    output_dir: Path | None = None
    context_parallel_size: int = 1
    options: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MicroserviceSettings:
    """All settings of a microservice."""

    job_id: str
    model_path: str
    """The path as given; "" only if a pipeline has a key for its weights."""
    address: Address
    network_arch: str = ""
    profile: Profile = GENERAL
    specs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The specs of the job."""
    folder: Path = Path("/tmp/tao_models")  # noqa: S108  # its owner is checked
    """Folder for model downloads and the state file."""
    task: str = ""
    """The model kind, if the files do not determine it."""
    base_model_path: str = ""
    """The base model, if `model_path` is a LoRA adapter."""
    credentials: CloudCredentials | None = None
    """Credentials of the workspace (REST mode); None for a service of the launcher, which has no cloud access."""
    idle: IdleSettings = IdleSettings()
    callback: CallbackSettings | None = None
    pipeline: PipelineChoice = PipelineChoice()
    media: MediaSettings = field(default_factory=MediaSettings)
    limits: Limits = field(default_factory=lambda: Limits(body_bytes=BODY_BYTES))
    grace_seconds: float = 30.0
    pid_file: Path | None = None
    access_log: bool = False
    secrets: Secrets = field(default_factory=Secrets)
    nodes: NodeSettings = field(default_factory=NodeSettings)
    """The nodes that compute a language model together, as Slurm has started them. Node 0 serves."""
