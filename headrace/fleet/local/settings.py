# SPDX-License-Identifier: Apache-2.0
"""Settings of the local fleet, and its state folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

STATE_DIR = "HEADRACE_STATE_DIR"
"""Variable with the state folder, for the daemon and its clients."""
SOCKET = "control.sock"


@dataclass(frozen=True)
class LocalSettings:
    """Settings of the daemon."""

    root: Path
    """The state folder: documents, pods, logs, models."""
    port: int = 8080
    """Port of the first service; later services take the next free ports."""
    host: str = "127.0.0.1"
    """The address that everything listens on."""
    pod_ports: tuple[int, int] = (22_000, 31_999)
    models_root: Path | None = None
    """Local folder to use as /mnt/models; models found there are not downloaded."""
    node: str = field(default_factory=socket.gethostname)
    log_bytes: int = 4 << 20
    """Bytes kept of each log; it may grow to twice as much."""
    events: int = 1000
    """Maximum number of events."""
    back_off_seconds: float = 10.0
    """Pause before the second restart; each further one waits twice as long."""
    back_off_most_seconds: float = 300.0
    healthy_seconds: float = 600.0
    """A container that runs this long resets its back-off."""
    quick_seconds: float = 0.02
    """Pause between probes of a container that is not ready. A failure counts once per period of the probe."""
    retry_seconds: float = 2.0
    """Pause between attempts to place a pod, and to download a model."""
    forget_seconds: float = 5.0
    """Maximum wait until routers send no more requests to a pod that is deleted."""
    trace_endpoint: str = ""
    """OTLP/HTTP collector for cold starts; "": none."""
    driver: Literal["process", "docker"] = "process"
    """The container runtime: processes of this machine, or its Docker engine."""
    max_processes: int = 0
    """Maximum processes and threads per container (0: unlimited)."""
    drain_seconds: float = 300.0
    """Maximum wait until a pod that is deleted has answered its open requests."""
    ephemeral: bool = False
    """Stop all services when the daemon ends."""


def state_dir(given: str = "", environ: Mapping[str, str] = os.environ) -> Path:
    """Return the state folder of this user's fleet."""
    folder = given or environ.get(STATE_DIR, "")
    if folder:
        return Path(folder).expanduser().absolute()
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "headrace" / "fleet"
