# SPDX-License-Identifier: Apache-2.0
"""What can be chosen about a workspace. Made by whoever makes a `LeptonDriver`, from variables and options."""

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
    """A workspace and its token are needed; a resource shape as soon as there are GPUs."""

    workspace: str = ""
    token: str = field(default="", repr=False)
    gateway: str = GATEWAY
    """Where the API is; the path of the workspace is added."""
    resource_shape: str = ""
    """What a replica runs on, `gpu.8xh100-sxm`; without GPUs and without a choice: `cpu.small`."""
    dedicated_node_group: str = ""
    """The node group it must run in; "": any."""
    image_pull_secret: str = ""
    """The workspace's secret for the registry of private images."""
    storage: str = ""
    """The workspace's storage that mounts are taken from, `node-nfs:shared`: there are no folders of a host."""
    shell: str = "/bin/bash"
    """What runs a service's line."""
    shared_memory_mib: int = 16 * 1024
    endpoint_token: str = field(default="", repr=False)
    """What callers of the service have to send as bearer token."""
    public: bool = False
    """Let everybody call the service, without a token. Neither: as the workspace has it for new endpoints."""
    request_seconds: float = 60.0
    stop_seconds: float = 300.0
    """How long the platform may take to take an endpoint down."""
    poll_seconds: float = 1.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **given: Any) -> LeptonSettings:
        """LEPTON_WORKSPACE_ID, LEPTON_AUTH_TOKEN (or LEPTON_WORKSPACE_TOKEN), LEPTON_ENDPOINT_TOKEN; over them `given`."""
        said = {
            "workspace": environ.get(WORKSPACE, ""),
            "token": environ.get(TOKEN) or environ.get(TOKEN_OF_LEP, ""),
            "endpoint_token": environ.get("LEPTON_ENDPOINT_TOKEN", ""),
        }
        return cls(**{**said, **given})
