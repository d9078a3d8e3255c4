# SPDX-License-Identifier: Apache-2.0
"""Servers of the v2 protocol over a folder of models or over functions, with settings, for tests.

with models_served(folder, V2Settings(allow_client_shm=True)) as server: ...
with functions_served([(config, function)], ...) as server: ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from headrace.api.v2.grpc import V2Grpc
from headrace.api.v2.http import V2Http
from headrace.api.v2.settings import V2Settings
from headrace.api.v2.shared_state import V2State
from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.engine.dataplane import DataPlane
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.net.grpc.services import Services
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.engines import plane_of
from support.serving import Serving, serving


def site_of(plane: DataPlane, settings: V2Settings | None = None, tracer: Tracer = NO_TRACING) -> Site:
    """v2 and nothing else."""
    shared = V2State(plane, settings, tracer)
    routes, services = Routes(), Services()
    V2Http(plane, tracer, shared).add_to(routes)
    V2Grpc(plane, tracer, shared).add_to(services)
    return Site(routes, services=services)


@contextmanager
def models_served(folder: Path, settings: V2Settings | None = None, **repository: Any) -> Iterator[Serving]:
    """A repository on disk."""
    engines: list[Engine] = []

    async def site() -> Site:
        control = RepositorySettings(**repository)
        engines.append(open_engine(EngineSettings(repositories=(folder,), repository=control)))
        await engines[0].start()
        return site_of(engines[0].plane, settings)

    with serving(site) as running:
        yield running
        running.call(engines[0].close, 5)


@contextmanager
def functions_served(
    models: Sequence[tuple[Any, Any]], settings: V2Settings | None = None, tracer: Tracer = NO_TRACING
) -> Iterator[Serving]:
    """Functions as models;"""
    planes: list[DataPlane] = []

    async def site() -> Site:
        planes.append(await plane_of(models))
        return site_of(planes[0], settings, tracer)

    async def retire() -> None:
        for version in planes[0].statistics():
            await version.retire(5)

    with serving(site) as running:
        yield running
        running.call(retire)


def ask(
    server: Serving, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """One HTTP request: a document is sent as JSON, bytes as they are. The answer's JSON, or its bytes."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body)
    try:
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    try:
        return answer.status, json.loads(content) if content else None
    except ValueError:
        return answer.status, content


def write_model(folder: Path, name: str, config: str, code: str = "") -> Path:
    """A model of a repository: its configuration, and its Python code if it has some."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(config)
    if code:
        (folder / name / "1" / "model.py").write_text(code)
    return folder / name
