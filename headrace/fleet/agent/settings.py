# SPDX-License-Identifier: Apache-2.0
"""What an agent is told. Made by the CLI."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.fleet.cluster.queue import LONGEST_SECONDS
from headrace.models.storage.bringing import BringSettings


@dataclass(frozen=True)
class AgentSettings:
    """What the agent is told."""

    node: str
    models_root: Path = Path("/mnt/models")
    """Where models are, on the node and in the agent's pod alike."""
    namespace: str = "headrace-system"
    """Of the ConfigMaps, and of the Secrets of ClusterBaseModels."""
    kubeconfig: str = ""
    context: str = ""
    address: str = ""
    """Where `/metrics` and `/healthz` are, `host:port`; "": nowhere."""
    downloads: int = 2
    """How many at once."""
    keep_free_bytes: int = 1_000_000_000
    """What downloads leave free on the disk."""
    progress_seconds: float = 5.0
    """How often at most progress is told."""
    look_seconds: float = 30.0
    """How often to look at the node and its ConfigMap."""
    tell_seconds: float = 1.0
    """How often at most anything is told."""
    retry_seconds: float = LONGEST_SECONDS
    """The longest wait before another try."""
    bring: BringSettings = field(default_factory=BringSettings)
