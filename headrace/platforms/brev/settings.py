# SPDX-License-Identifier: Apache-2.0
"""Settings of the driver `brev`, from variables and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

TOKEN = "BREV_API_TOKEN"  # noqa: S105  # the name of a variable
Reach = Literal["forward", "public"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrevSettings:
    """An existing instance, or the instance to create for a service."""

    instance_id: str = ""
    """Name of the instance. "": each service has its own instance, which is deleted with it."""
    instance_type: str = ""
    """Type of an instance to create: `brev search` lists the types."""
    gpu_name: str = ""
    """GPU of an instance to create."""
    cloud_cred_id: str = ""
    workspace_group_id: str = ""
    reach: Reach = "forward"
    """`forward`: services listen on the instance's loopback and are reached through `brev port-forward`. `public`: they
    listen on every address of the instance, and every client that reaches it may call them."""
    public_host: str = ""
    """For `public`: the instance's address; "": from the ssh configuration that brev writes."""
    login: bool = False
    """Whether to run `brev login --token` with BREV_API_TOKEN if brev is not logged in: `ps` shows the token meanwhile."""
    token: str = field(default="", repr=False)
    registry: str = "nvcr.io"
    registry_user: str = "$oauthtoken"
    registry_key: str = field(default="", repr=False)
    """NGC_KEY, for images of `registry`; "": the instance's own logins."""
    shell: str = ""
    """The shell that runs the command of a service; "": the image's label `headrace.shell`, else /bin/bash."""
    shm_bytes: int = 16 * 1024**3
    state_dir: Path = Path("~/.local/state/headrace/brev")
    """Folder with the records of forwardings."""
    program: str = "brev"
    command_seconds: float = 120.0
    """Timeout of brev commands, except the following."""
    ready_seconds: float = 900.0
    """Timeout until a new instance runs commands."""
    pull_seconds: float = 3600.0
    stop_seconds: float = 600.0
    """Timeout of the deletion of an instance."""
    poll_seconds: float = 5.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **given: Any) -> BrevSettings:
        """Read BREV_API_TOKEN, BREV_INSTANCE, NGC_KEY and XDG_STATE_HOME; `given` overrides them."""
        values: dict[str, Any] = {"token": environ.get(TOKEN, ""), "registry_key": environ.get("NGC_KEY", "")}
        if environ.get("BREV_INSTANCE"):
            values["instance_id"] = environ["BREV_INSTANCE"]
        if environ.get("XDG_STATE_HOME"):
            values["state_dir"] = Path(environ["XDG_STATE_HOME"]) / "headrace" / "brev"
        return cls(**{**values, **given})
