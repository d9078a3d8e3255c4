# SPDX-License-Identifier: Apache-2.0
"""Settings of the job service and the job API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """Settings of platforms other than `process`: those that run images, or commands on other machines."""

    platform: str
    """`local-docker`, `kubernetes` or `slurm`, as in `platforms.drivers`."""
    image: str = "headrace"
    """"headrace", "tao" for the image of each architecture, a key of versions.yaml, or an image name."""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment with IMAGE_<KEY>, HEADRACE_IMAGE and TAO_VERSIONS_FILE."""
    bare: bool = False
    """Slurm without containers: `headrace` is installed on the nodes."""
    gpus: bool = True
    """Whether services request GPUs, at least one each; a cluster without GPUs could never schedule them."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Times are in seconds."""

    data_dir: Path
    """The gateway's data directory: database, key file, logs and downloads."""
    database_url: str = ""
    """postgresql://..., or "" for SQLite in the data directory."""
    key_file: Path | None = None
    """Key file that encrypts secrets in the database; gateways of one database share it. Default: in the data directory."""
    callback_url: str = ""
    """URL by which services reach this gateway; "" for none: then idle services are not stopped."""
    checkpoint_folders: tuple[Path, ...] = ()
    """Local folders in which users may name models. The operator may register models anywhere."""
    trust_remote_code: bool = False
    """Whether users may start models with their own Python code."""
    grace_seconds: float = 30.0
    """How long requests in flight may take when a service is stopped."""
    lease_seconds: float = 90.0
    """How long a gateway that lost its network keeps other gateways from acting on a job."""
    status_seconds: float = 30.0
    """Timeout of a status request to a service."""
    idle_timeout_minutes: float = 30.0
    """Minutes without a request after which a service asks to be stopped; 0 for never."""
    service_target: str = "headrace.cli.main:main"
    """Entry point of a service's program; its first arguments are in `service_args`."""
    service_args: tuple[str, ...] = ("microservice",)
    service_host: str = "127.0.0.1"
    port_range: tuple[int, int] = (20_000, 31_999)
    """Ports of services: below the kernel's range for outgoing connections."""
    log_bytes: int = 2 * 1024 * 1024
    """Minimum size of a service's log before it is truncated."""
    max_services: int = 1000
    """Maximum number of services in this place."""
    containers: ContainerSettings | None = None
    """None for local processes. Other programs may use the platform too: services without a record are not touched."""

    max_batches: int = 2
    """Maximum number of running batches in this place; others wait."""
    batch_restarts: int = 5
    """How often a killed batch process is restarted."""
    batch_target: str = "headrace.cli.main:main"
    """Entry point of a batch's program; its first arguments are in `batch_args`."""
    batch_args: tuple[str, ...] = ("batch",)

    runner_actions: frozenset[str] = frozenset({"inference"})
    """Actions whose jobs start as Pending. `batch_jobs` runs `inference`; external runners run the others."""

    @property
    def key_path(self) -> Path:
        """Return the path of the key file."""
        return self.key_file or self.data_dir / "jobs.key"

    @property
    def launch_folder(self) -> Path:
        """Return the folder of the process driver."""
        return self.data_dir / "launch"

    @property
    def models_folder(self) -> Path:
        """Return the folder for model downloads of all services."""
        return self.data_dir / "models"

    def files_folder(self, org: str) -> Path:
        """Return the folder to which relative paths of an organisation's batches refer."""
        return self.data_dir.absolute() / "batches" / org / "files"

    def batch_cache(self, org: str) -> Path:
        """Return the folder for downloads of an organisation's batches, and for results to be uploaded."""
        return self.data_dir.absolute() / "batches" / org / "cache"

    @property
    def url(self) -> str:
        """Return the URL of the database."""
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / 'headrace.sqlite3'}"


@dataclass(frozen=True, slots=True)
class JobsApiSettings:
    """Times are in seconds."""

    inference_seconds: float = 300.0
    """Timeout of an inference request to a service."""
    connect_seconds: float = 5.0
    """Timeout of a connection to a service."""
    concurrency: int = 256
    """Maximum number of inference requests in flight per service; more get 429."""
    fresh_seconds: float = 1.0
    """How long the endpoint of a service is cached: another gateway may have stopped it."""
    forget_seconds: float = 120.0
    """Idle time after which the connections to a service are closed."""
    whole_bytes: int = 64 * 1024
    """Inference request bodies up to this size are forwarded in one piece; longer ones are streamed."""
