# SPDX-License-Identifier: Apache-2.0
"""What `headrace gateway` can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.limits import MIB, Limits
from headrace.jobs.api.settings import JobsApiSettings
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles

_BODY_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class PlatformSettings:
    """Where services run."""

    name: str = "process"
    """`process`, `local-docker`, `kubernetes` or `slurm`."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Settings of the platform, by the names that its driver has."""
    image: str = ""
    """"": ours. See `jobs.settings.ContainerSettings.image`."""
    callback_url: str = ""
    """Under which services reach the gateway from where they run; "": they do not, and nobody stops idle ones."""
    gpus: bool = True
    """Whether services get GPUs there."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """All of it; times in seconds."""

    address: Address
    data_dir: Path
    database_url: str = field(default="", repr=False)
    """"" for SQLite in the data directory."""
    tls: TlsFiles | None = None
    insecure: bool = False
    """Whether others may connect without TLS."""
    stop_services: bool = False
    """Whether services end with the gateway; else they run on, and the next start finds them."""
    checkpoint_folders: tuple[Path, ...] = ()
    """Folders of this machine below which users may name models."""
    idle_timeout_minutes: float = 30.0
    """Without a request, until a service is stopped. 0 for never."""
    token_key: Path | None = None
    """A PEM file that signs tokens (RS256, EdDSA); else a secret of the data directory does (HS256)."""
    secrets_key: Path | None = None
    """Encrypts the keys of workspaces; gateways of one database share it. A file of the data directory else."""
    trust_remote_code: bool = False
    """Whether users may start models that bring their own Python code."""
    grace_seconds: float = 30.0
    """How long a request in flight may take after SIGTERM."""
    reconcile_seconds: float = 5.0
    """How often records are held against what runs."""
    access_log: bool = False
    console: bool = True
    """Whether `/console` is served. Its page is for everybody; what it shows needs a login."""
    max_batches: int = 2
    """Jobs of the action `inference` that run at once; others wait."""
    platform: PlatformSettings = field(default_factory=PlatformSettings)
    api: JobsApiSettings = field(default_factory=JobsApiSettings)
    limits: Limits = field(default_factory=lambda: Limits(body_bytes=_BODY_BYTES))
    """The longest body, but of inference requests, which are passed on as they come."""
