# SPDX-License-Identifier: Apache-2.0
"""Settings of the Docker engine and of its containers, from variables and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from headrace.core.errors import InvalidArgument

GpuWay = Literal["auto", "devices", "tegra", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerSettings:
    """The defaults fit one machine with one engine."""

    host: str = ""
    """The engine, in the form of DOCKER_HOST: unix://, tcp://, ssh://user@machine. "": the docker program chooses."""
    network: str = "tao_default"
    """The network that services share; each has its job id as host name. Created if it does not exist."""
    address: str = "127.0.0.1"
    """The address on which services are published on the engine's machine; "0.0.0.0": all interfaces."""
    url_host: str = ""
    """The name of that machine in URLs of services; "": localhost, or the machine in DOCKER_HOST."""
    gpu_way: GpuWay = "auto"
    """How containers get GPUs: by device requests, or on Tegra by the runtime nvidia and its variables.

    `none`: services run without GPUs, however many they request."""
    gpu_ids: tuple[str, ...] = ()
    """The GPUs that services may use, for shared machines; empty: the engine's first GPUs."""
    check_gpus: bool = False
    """Whether the preflight runs nvidia-smi in a container."""
    gpu_image: str = "ubuntu"
    """The image for that check."""
    shm_bytes: int = 16 * 1024**3
    """The size of /dev/shm: memory is used only when it is written to."""
    shell_path: str = ""
    """The shell that runs the command of a service; "": the image's label `headrace.shell`, else /bin/bash."""
    registry: str = "nvcr.io"
    """The registry that `registry_key` is for."""
    registry_user: str = "$oauthtoken"
    registry_key: str = field(default="", repr=False)
    """NGC_KEY; "": the logins of the docker program."""
    log_bytes: int = 50 * 1024 * 1024
    """How much of a service's log is kept."""
    pull_seconds: float = 3600.0
    """Timeout of a pull."""
    command_seconds: float = 60.0
    """Timeout of every other command."""

    def __post_init__(self) -> None:
        if self.gpu_way not in get_args(GpuWay):
            raise InvalidArgument(
                f"gpu_way {self.gpu_way[:64]!a} is not known: use one of {', '.join(get_args(GpuWay))}"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **given: Any) -> DockerSettings:
        """Read DOCKER_HOST, DOCKER_NETWORK, DOCKER_USERNAME and NGC_KEY; `given` overrides them."""
        names = {
            "DOCKER_HOST": "host",
            "DOCKER_NETWORK": "network",
            "DOCKER_USERNAME": "registry_user",
            "NGC_KEY": "registry_key",
        }
        values = {field_name: environ[name] for name, field_name in names.items() if environ.get(name)}
        return cls(**{**values, **given})
