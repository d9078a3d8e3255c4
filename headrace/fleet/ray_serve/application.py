# SPDX-License-Identifier: Apache-2.0
"""The Ray Serve application of a service: for `ray.serve.run`, for `serve run`, and for Serve config files.

serve run headrace.fleet.ray_serve.application:build files=digits.yaml
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve

from headrace.core.errors import InvalidArgument
from headrace.fleet.ray_serve.replica import ReplicaServer
from headrace.fleet.ray_serve.replica_spec import ReplicaSpec, deployment_options
from headrace.fleet.ray_serve.translation import read_services
from headrace.fleet.yaml_documents import read

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class Replica:
    """What Ray Serve calls. It awaits every method, the constructor and `__del__` too."""

    async def __init__(self, content: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._server: ReplicaServer | None = None
        self._server = await ReplicaServer.start(content)

    async def __call__(self, request: Request) -> Response:
        """Answer one HTTP request."""
        return await self._started.answer(request)

    async def check_health(self) -> None:
        """Raise if the server has ended or is not ready: after three times Ray Serve replaces the replica."""
        await self._started.check()

    async def __del__(self) -> None:
        """Stop the server. Ray Serve calls this when no request is open, or the time for them is over."""
        if self._server is not None:
            await self._server.stop()

    @property
    def _started(self) -> ReplicaServer:
        if self._server is None:
            raise RuntimeError("Ray Serve has not started this replica")
        return self._server


def application(spec: ReplicaSpec) -> Any:
    """Return the Ray Serve application of a service."""
    return serve.deployment(Replica, **deployment_options(spec)).bind(spec.as_json())


def build(arguments: Mapping[str, Any]) -> Any:
    """Return the application of the service in files: `files` is a list of paths, or a text with commas.

    Raises InvalidArgument with every problem of the files.
    """
    files = arguments.get("files", "")
    paths = [str(path) for path in files] if isinstance(files, list | tuple) else str(files).split(",")
    services = read_services(read([Path(path.strip()) for path in paths if path.strip()]))
    problems = [str(error) for error in services.errors]
    if not problems and len(services.specs) != 1:
        problems = [f"an application is one InferenceService, and the files have {len(services.specs)}"]
    if problems:
        raise InvalidArgument("\n".join(problems))
    return application(services.specs[0])
