# SPDX-License-Identifier: Apache-2.0
"""The description of a server: its ports, command, environment and workloads."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ports:
    """Free ports of 127.0.0.1 picked for one run of a server."""

    http: int
    grpc: int
    metrics: int
    # Where requests go on to; 0 for a server that answers by itself.
    backend: int = 0


@dataclass(frozen=True)
class Launch:
    """What to execute, and what to add to the environment."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Server:
    """One column of the comparison."""

    name: str
    workloads: tuple[str, ...]
    launch: Callable[[Ports], Launch]
    # The path that answers 200 when the server is ready; None for a server that speaks gRPC only.
    ready_path: str | None
    dialect: str = "v2"
    # The environment under .venvs/ that it runs in, its name's unless told; "" for Headrace's own.
    environment: str | None = None
    # Whether it is held on one core, with the load generator on the others.
    one_core: bool = False
    # The server that runs behind it, for one that passes requests on.
    behind: str | None = None
    # A program without which it is left out, and said to be.
    needs: str = ""

    @property
    def venv(self) -> str:
        return self.name if self.environment is None else self.environment

    @property
    def is_peer(self) -> bool:
        return bool(self.venv)

    @property
    def is_available(self) -> bool:
        return not self.needs or program(self.needs) is not None


def program(name: str) -> str | None:
    """Where this program of the system is; servers are not on everybody's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
