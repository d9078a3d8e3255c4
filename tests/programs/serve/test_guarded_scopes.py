# SPDX-License-Identifier: Apache-2.0
"""Which scope and which worker policy each route and gRPC method of a server is registered with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import routes_and_rights as rights
from surfaces import server_settings

from headrace.api.openai.settings import OpenAiSettings
from headrace.core.kv_transfer import KvTransferSettings
from headrace.core.telemetry.tracing import NO_TRACING
from headrace.engine.engine import EngineSettings, open_engine
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Exchange
from headrace.net.http.routes import Policy, Routes
from headrace.programs.serve.access_guard import Middleware
from headrace.programs.serve.protocols import build_protocols
from headrace.programs.serve.worker import Worker

WORKERS = {
    "gather": """
        GET /admin/traffic/{}/report
        GET /api/status
        GET /api/status/
        GET /api/status/{}
        GET /console/api/live
        GET /console/api/requests
        GET /v2/models/stats
        GET /v2/models/{}/stats
        GET /v2/models/{}/versions/{}/stats
        /inference.GRPCInferenceService/ModelStatistics
        /nvidia.inferenceserver.GRPCService/Status
    """,
    "all": """
        POST /api/sharedmemorycontrol/cudaregister/{}/{}/{}
        POST /api/sharedmemorycontrol/register/{}//{}/{}/{}
        POST /api/sharedmemorycontrol/register/{}/{}/{}/{}
        POST /api/sharedmemorycontrol/status
        POST /api/sharedmemorycontrol/unregister/{}
        POST /api/sharedmemorycontrol/unregisterall
        POST /v1/load_lora_adapter
        POST /v1/unload_lora_adapter
        POST /v2/cudasharedmemory/region/{}/register
        POST /v2/cudasharedmemory/region/{}/unregister
        POST /v2/cudasharedmemory/unregister
        POST /v2/logging
        POST /v2/models/{}/trace/setting
        POST /v2/systemsharedmemory/region/{}/register
        POST /v2/systemsharedmemory/region/{}/unregister
        POST /v2/systemsharedmemory/unregister
        POST /v2/trace/setting
        /inference.GRPCInferenceService/CudaSharedMemoryRegister
        /inference.GRPCInferenceService/CudaSharedMemoryUnregister
        /inference.GRPCInferenceService/LogSettings
        /inference.GRPCInferenceService/SystemSharedMemoryRegister
        /inference.GRPCInferenceService/SystemSharedMemoryUnregister
        /inference.GRPCInferenceService/TraceSetting
        /nvidia.inferenceserver.GRPCService/SharedMemoryControl
    """,
    "all-running": """
        POST /console/api/requests
        POST /v1/responses/{}/cancel
    """,
    "all-ordered": """
        DELETE /admin/traffic/{}
        POST /admin/traffic/{}
        POST /admin/traffic/{}/rollback
        PUT /admin/traffic/{}
    """,
}
"""Every other route and method is answered by the worker that received it."""


class Server:
    """Everything that a server with everything on has registered."""

    def __init__(self, routes: Routes, services: Services, worker: Worker) -> None:
        self.routes, self.worker = routes, worker
        self.policies: dict[str, Policy] = {
            f"{method} {path}": routes.find(method.encode(), path.encode())[0].policy
            for method, path in routes.listed()
        } | services.policies


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("policies")
    (folder / "started").write_text("0.0")
    return asyncio.run(_registered(folder))


async def _registered(folder: Path) -> Server:
    settings = server_settings(
        engine=EngineSettings(gpus=0, kv_transfer=KvTransferSettings("prefill")),
        openai=OpenAiSettings(batch_folder=folder / "batches"),
    )
    engine = open_engine(settings.engine)
    worker = Worker(str(folder), 0, 2, engine.plane)
    protocols = build_protocols(engine, settings, NO_TRACING, worker)
    services = protocols.site.services
    assert isinstance(services, Services)
    await protocols.close()
    await engine.close(0)
    return Server(protocols.site.routes, services, worker)


def test_every_route_and_method_declares_its_scope(server: Server) -> None:
    expected = {
        name: None if right == "open" else right
        for table in (rights.SERVER, rights.SERVER_CALLS)
        for name, right in rights.by_route(table).items()
    }
    assert {name: policy.scope for name, policy in server.policies.items()} == expected


def test_mounts_declare_their_scope(server: Server) -> None:
    for path, scope in ((b"/api/none", "read"), (b"/v1/none", "infer")):
        assert server.routes.find(b"GET", path)[0].policy == (scope, "one", False)


def test_every_route_and_method_declares_its_worker_policy(server: Server) -> None:
    expected = dict.fromkeys(server.policies, "one") | rights.by_route(WORKERS)
    assert {name: policy.workers for name, policy in server.policies.items()} == expected


def test_broadcast_requests_are_known_to_every_worker(server: Server) -> None:
    broadcast = [name for name, policy in server.policies.items() if policy.workers.startswith("all")]
    known = server.worker.broadcaster._handlers
    assert len(known) == len(broadcast)
    forgotten = {"POST /console/api/requests", "POST /v1/responses/{id}/cancel"}
    assert known.keys() - server.worker.broadcaster._remembered_names == forgotten


def test_undeclared_routes_and_methods_need_the_strictest_scope() -> None:
    requests: list[tuple[str, Any]] = []

    def wrap(scope: Any, handler: Any, **more: Any) -> Any:
        requests.append((scope, handler))
        return handler

    guard: Any = SimpleNamespace(http=wrap, unary=wrap, streaming=wrap, needs_keys=True)
    middleware = Middleware(guard)
    routes, services = Routes(middleware.http), Services(middleware)

    def handle(exchange: Exchange) -> None: ...

    routes.add("GET", "/something/new", handle)
    routes.mount("/somewhere", handle)
    routes.fallback(handle, handle, whole_bytes=1)
    services.unary("some.Service", "Unknown", lambda call, message: None)
    services.streaming("some.Service", "Stream", lambda call: None)
    assert [scope for scope, _ in requests] == ["admin"] * 6
