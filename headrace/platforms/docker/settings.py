# SPDX-License-Identifier: Apache-2.0
"""What can be chosen about containers. Made by whoever makes a `DockerDriver`, from variables and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from headrace.core.errors import InvalidArgument

GpuWay = Literal["auto", "devices", "tegra", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerSettings:
    """All fields have defaults that do on one machine with one engine."""

    host: str = ""
    """The engine, as DOCKER_HOST says it: unix://, tcp://, ssh://user@machine. "": the docker program's own choice."""
    network: str = "tao_default"
    """The network that services share, in which each is reached by its job id. Made if it is not there."""
    address: str = "127.0.0.1"
    """Where services are published on the engine's machine; "0.0.0.0": everywhere, also to the outside."""
    url_host: str = ""
    """The name of that machine in services' URLs; "": localhost, or the machine that DOCKER_HOST names."""
    gpu_way: GpuWay = "auto"
    """How containers get GPUs: by device requests, or as on Tegra by the runtime nvidia and its variables.

    `none`: not at all, however many are asked for, on an engine's machine without any."""
    gpu_ids: tuple[str, ...] = ()
    """Which GPUs may be given, for machines that others use too; none named: the engine's first ones."""
    check_gpus: bool = False
    """Whether the preflight runs nvidia-smi in a container."""
    gpu_image: str = "ubuntu"
    """The image in which it does."""
    shm_bytes: int = 16 * 1024**3
    """The size of /dev/shm: no memory is taken before it is written to."""
    shell_path: str = ""
    """What runs a service's line; "": what the image's label `headrace.shell` says, else /bin/bash."""
    registry: str = "nvcr.io"
    """For whose images `registry_key` is the key."""
    registry_user: str = "$oauthtoken"
    registry_key: str = field(default="", repr=False)
    """NGC_KEY; "": the docker program's own logins."""
    log_bytes: int = 50 * 1024 * 1024
    """How much of what a service says is kept."""
    pull_seconds: float = 3600.0
    """How long an image may take to arrive."""
    command_seconds: float = 60.0
    """How long anything else may take."""

    def __post_init__(self) -> None:
        if self.gpu_way not in get_args(GpuWay):
            raise InvalidArgument(
                f"gpu_way {self.gpu_way[:64]!a} is not known: use one of {', '.join(get_args(GpuWay))}"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **given: Any) -> DockerSettings:
        """What DOCKER_HOST, DOCKER_NETWORK, DOCKER_USERNAME and NGC_KEY say, and over them what is given."""
        names = {
            "DOCKER_HOST": "host",
            "DOCKER_NETWORK": "network",
            "DOCKER_USERNAME": "registry_user",
            "NGC_KEY": "registry_key",
        }
        said = {field_name: environ[name] for name, field_name in names.items() if environ.get(name)}
        return cls(**{**said, **given})
