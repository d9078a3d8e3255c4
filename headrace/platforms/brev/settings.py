# SPDX-License-Identifier: Apache-2.0
"""What can be chosen about instances. Made by whoever makes a `BrevDriver`, from variables and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

TOKEN = "BREV_API_TOKEN"  # noqa: S105  # the name of a variable
Reach = Literal["forward", "public"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrevSettings:
    """An instance that is there, or what is to be created for a service."""

    instance_id: str = ""
    """The name of the instance to use. "": each service has one of its own, which is deleted with it."""
    instance_type: str = ""
    """What to create where the instance is not there: `brev search` lists the types."""
    gpu_name: str = ""
    """The same, by the GPU's name."""
    cloud_cred_id: str = ""
    workspace_group_id: str = ""
    reach: Reach = "forward"
    """`forward`: services listen on the instance's loopback and are reached through `brev port-forward`. `public`: they
    listen on every address of the instance, and whoever reaches it may call them."""
    public_host: str = ""
    """For `public`: the instance's address; "": the one that brev has written into the ssh configuration."""
    login: bool = False
    """Whether to run `brev login --token` with BREV_API_TOKEN where brev is not logged in: `ps` shows it meanwhile."""
    token: str = field(default="", repr=False)
    registry: str = "nvcr.io"
    registry_user: str = "$oauthtoken"
    registry_key: str = field(default="", repr=False)
    """NGC_KEY, for images of `registry`; "": the logins that the instance has."""
    shell: str = ""
    """What runs a service's line; "": what the image's label `headrace.shell` says, else /bin/bash."""
    shm_bytes: int = 16 * 1024**3
    state_dir: Path = Path("~/.local/state/headrace/brev")
    """Where it is kept which forwarding belongs to which service."""
    program: str = "brev"
    command_seconds: float = 120.0
    """How long brev may take for anything but the following."""
    ready_seconds: float = 900.0
    """How long a new instance may take until it runs commands."""
    pull_seconds: float = 3600.0
    stop_seconds: float = 600.0
    """How long an instance may take to be deleted."""
    poll_seconds: float = 5.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **given: Any) -> BrevSettings:
        """BREV_API_TOKEN, BREV_INSTANCE, NGC_KEY, XDG_STATE_HOME; over them what is given."""
        said: dict[str, Any] = {"token": environ.get(TOKEN, ""), "registry_key": environ.get("NGC_KEY", "")}
        if environ.get("BREV_INSTANCE"):
            said["instance_id"] = environ["BREV_INSTANCE"]
        if environ.get("XDG_STATE_HOME"):
            said["state_dir"] = Path(environ["XDG_STATE_HOME"]) / "headrace" / "brev"
        return cls(**{**said, **given})
