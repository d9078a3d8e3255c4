# SPDX-License-Identifier: Apache-2.0
"""What the operator decides for jobs. Made by the gateway and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """For platforms that run images, or commands of their own machines: every one but `process`."""

    platform: str
    """`local-docker`, `kubernetes`, `slurm`, as `launch.drivers` names them."""
    image: str = "headrace"
    """Ours; or "tao" for that of each architecture, a key of versions.yaml, or an image."""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Has IMAGE_<KEY>, HEADRACE_IMAGE and TAO_VERSIONS_FILE, where they are set."""
    bare: bool = False
    """Slurm's mode without a container: `headrace` is on the nodes."""
    gpus: bool = True
    """Whether services get GPUs. Each asks for one at least, which a cluster without any would never give."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Frozen; times in seconds."""

    data_dir: Path
    """Of the gateway: database, key file, logs and downloads lie below it."""
    database_url: str = ""
    """"" for SQLite in the data directory; or postgresql://..."""
    key_file: Path | None = None
    """Encrypts what is secret in the database; gateways of one database share it. Default: in the data directory."""
    callback_url: str = ""
    """Under which services reach this gateway, "http://127.0.0.1:8090"; "" for none, and then nobody stops idle ones."""
    checkpoint_folders: tuple[Path, ...] = ()
    """Folders of this machine below which users may name models. Registered by the operator: anywhere."""
    trust_remote_code: bool = False
    """Whether users may start models that bring their own Python code."""
    grace_seconds: float = 30.0
    """For what is in flight when a service is stopped."""
    lease_seconds: float = 90.0
    """How long a gateway that vanished from the network keeps others from acting on a job."""
    status_seconds: float = 30.0
    """For a service to say how it is."""
    idle_timeout_minutes: float = 30.0
    """Without a request, until a service asks to be stopped. 0 for never."""
    service_target: str = "headrace.cli.main:main"
    """The program of a service, and below its first words."""
    service_words: tuple[str, ...] = ("microservice",)
    service_host: str = "127.0.0.1"
    port_range: tuple[int, int] = (20_000, 31_999)
    """For services: below those that the kernel takes for outgoing connections."""
    log_bytes: int = 2 * 1024 * 1024
    """Of one service's log that are kept, at least."""
    max_services: int = 1000
    """At once on this place."""
    containers: ContainerSettings | None = None
    """None for processes of this machine. Others may use such a platform too: what has no record there is left alone."""

    max_batches: int = 2
    """At once on this place; others wait."""
    batch_restarts: int = 5
    """How often a batch whose process was killed is started again, to go on where it was."""
    batch_target: str = "headrace.cli.main:main"
    """The program of a batch, and below its first words."""
    batch_words: tuple[str, ...] = ("batch",)

    runner_actions: frozenset[str] = frozenset({"inference"})
    """Actions whose jobs begin as Pending. `inference` is run here (`batches`), others by who calls `move_job`."""

    @property
    def key_path(self) -> Path:
        """Of the key file."""
        return self.key_file or self.data_dir / "jobs.key"

    @property
    def launch_folder(self) -> Path:
        """Of the process driver."""
        return self.data_dir / "launch"

    @property
    def models_folder(self) -> Path:
        """Downloads of all services."""
        return self.data_dir / "models"

    def files_folder(self, org: str) -> Path:
        """Where relative paths of an organisation's batches begin."""
        return self.data_dir.absolute() / "batches" / org / "files"

    def batch_cache(self, org: str) -> Path:
        """Downloads of an organisation's batches, and results on their way to a bucket. Never another one's."""
        return self.data_dir.absolute() / "batches" / org / "cache"

    @property
    def url(self) -> str:
        """Of the database."""
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / 'headrace.sqlite3'}"
