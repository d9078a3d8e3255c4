# SPDX-License-Identifier: Apache-2.0
"""What the fleet of a machine is told, and where it lies."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

STATE_DIR = "HEADRACE_STATE_DIR"
"""The variable that names its folder, for the daemon and for the verbs."""
SOCKET = "control.sock"


@dataclass(frozen=True)
class LocalSettings:
    """See the module."""

    root: Path
    """Its folder: documents, pods, logs, models."""
    port: int = 8080
    """The first port for services; the next one gets the next that is free."""
    host: str = "127.0.0.1"
    """Where everything listens."""
    pod_ports: tuple[int, int] = (22_000, 31_999)
    models_root: Path | None = None
    """A folder that stands for /mnt/models: where files of models are that nobody brings."""
    node: str = field(default_factory=socket.gethostname)
    log_bytes: int = 4 << 20
    """Kept of each log; it may grow to twice as much."""
    events: int = 1000
    """Kept in all."""
    back_off_seconds: float = 10.0
    """Before the second restart; each further one waits twice as long."""
    back_off_most_seconds: float = 300.0
    healthy_seconds: float = 600.0
    """Who runs for so long starts anew with the back-off."""
    quick_seconds: float = 0.02
    """Between two looks at who is not ready yet. A look counts as a failure once in its probe's own period."""
    retry_seconds: float = 2.0
    """Between two looks for room, and at models that could not be brought."""
    forget_seconds: float = 5.0
    """The longest wait for routers to send nothing more to who is about to be ended."""
    trace_endpoint: str = ""
    """An OTLP/HTTP collector that routers send cold starts to; "": none."""
    driver: Literal["process", "docker"] = "process"
    """What runs containers: processes of this machine, or its Docker engine."""
    max_processes: int = 0
    """Processes and threads that a container may have; 0: any number."""
    drain_seconds: float = 300.0
    """The longest wait for the answers that it still owes to clients of those routers."""
    ephemeral: bool = False
    """End everything that runs when the daemon ends."""


def state_dir(said: str = "", environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of this user's fleet."""
    found = said or environ.get(STATE_DIR, "")
    if found:
        return Path(found).expanduser().absolute()
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "headrace" / "fleet"
