# SPDX-License-Identifier: Apache-2.0
"""Settings of the driver `lepton`, from variables and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORKSPACE = "LEPTON_WORKSPACE_ID"
TOKEN = "LEPTON_AUTH_TOKEN"  # noqa: S105  # the name of a variable
TOKEN_OF_LEP = "LEPTON_WORKSPACE_TOKEN"  # noqa: S105
GATEWAY = "https://gateway.dgxc-lepton.nvidia.com"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeptonSettings:
    """A workspace and its token are required; a resource shape too for services with GPUs."""

    workspace: str = ""
    token: str = field(default="", repr=False)
    gateway: str = GATEWAY
    """URL of the API; the path of the workspace is added."""
    resource_shape: str = ""
    """Resource shape of a replica, `gpu.8xh100-sxm`; default without GPUs: `cpu.small`."""
    dedicated_node_group: str = ""
    """The node group to run in; "": any."""
    image_pull_secret: str = ""
    """The workspace's secret for the registry of private images."""
    storage: str = ""
    """The workspace's storage for mounts, `node-nfs:shared`: there are no host folders."""
    shell: str = "/bin/bash"
    """The shell that runs the command of a service."""
    shared_memory_mib: int = 16 * 1024
    endpoint_token: str = field(default="", repr=False)
    """The bearer token that clients of the service must send."""
    public: bool = False
    """Whether clients need no token. Without this and a token: the workspace's default for new endpoints."""
    request_seconds: float = 60.0
    stop_seconds: float = 300.0
    """Timeout of the deletion of an endpoint."""
    poll_seconds: float = 1.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **given: Any) -> LeptonSettings:
        """Read LEPTON_WORKSPACE_ID, LEPTON_AUTH_TOKEN or LEPTON_WORKSPACE_TOKEN, LEPTON_ENDPOINT_TOKEN; then `given`."""
        values = {
            "workspace": environ.get(WORKSPACE, ""),
            "token": environ.get(TOKEN) or environ.get(TOKEN_OF_LEP, ""),
            "endpoint_token": environ.get("LEPTON_ENDPOINT_TOKEN", ""),
        }
        return cls(**{**values, **given})
