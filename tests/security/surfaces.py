# SPDX-License-Identifier: Apache-2.0
"""Every program's real table of routes, made by the code that its verb runs; the server on a port; verbs as processes."""

from __future__ import annotations

import hashlib
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from job_api import EXPERIMENT, JOB, ORG
from raw_requests import Answer, ask, send_raw

from headrace.api.access.api_keys import create_key
from headrace.api.access.settings import AccessSettings
from headrace.api.metrics.settings import MetricsSettings
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.predict.settings import PredictSettings
from headrace.api.v2.settings import V2Settings
from headrace.core.clock import SystemClock
from headrace.core.kv_transfer import KvTransferSettings
from headrace.core.telemetry.metrics import Registry
from headrace.core.telemetry.tracing import NO_TRACING
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.fleet.cluster.webhooks.server import WebhookMetrics, webhook_server
from headrace.fleet.local.api_server import ApiServer
from headrace.fleet.local.settings import SOCKET, LocalSettings
from headrace.fleet.metrics import AgentMetrics, OperatorMetrics, metrics_server
from headrace.fleet.router.proxy import RouterProxy
from headrace.fleet.router.settings import BackendAddress, RouterSettings
from headrace.jobs.microservice.profiles import profile_named
from headrace.jobs.microservice.service import Microservice
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.net.grpc.services import Services
from headrace.net.http.routes import Routes
from headrace.net.server import HttpServer
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.console.fleet import build_server as console_server
from headrace.programs.microservice import build_site as microservice_site
from headrace.programs.router import RouterAppSettings, build_router_site
from headrace.programs.serve.protocols import Protocols, build_protocols
from headrace.programs.serve.settings import ServerSettings
from support.ports import free_port
from support.programs import HEADRACE, Program
from support.serving import Serving, serving

SCOPES = ("infer", "read", "admin")
_HERE = Address("127.0.0.1", 0)
_NOTHING: Any = SimpleNamespace(calls=0, writes=0)


def server_settings(**more: Any) -> ServerSettings:
    """A server with everything on that can be turned on."""
    settings = ServerSettings(
        http=_HERE,
        grpc=_HERE,
        metrics_settings=MetricsSettings(),
        v2=V2Settings(allow_client_shm=True),
        predict=PredictSettings(),
        openai=OpenAiSettings(),
    )
    return replace(settings, **more)


def write_echo(models: Path) -> Path:
    """A folder with one model, which gives back what it gets."""
    (models / "echo/1").mkdir(parents=True)
    (models / "echo/config.pbtxt").write_text(
        """name: "echo" backend: "identity" max_batch_size: 8
        input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
        output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]"""
    )
    return models


class Served:
    """A server of the inference protocols that runs, and its keys by scope."""

    def __init__(self, server: Serving, protocols: Protocols, engine: Engine, keys: dict[str, str]) -> None:
        self.server, self.protocols, self.engine, self.keys = server, protocols, engine, keys
        self.port = server.port

    @property
    def routes(self) -> list[tuple[str, str]]:
        result: list[tuple[str, str]] = self.protocols.site.routes.listed()
        return result

    @property
    def calls(self) -> list[str]:
        services = self.protocols.site.services
        return sorted(services.policies) if isinstance(services, Services) else []


@contextmanager
def inference_server(folder: Path, *, keys: bool, models: Path | None = None, **more: Any) -> Iterator[Served]:
    """With `keys`, one of each scope; in explicit mode, with the models of a folder."""
    created: list[Any] = []
    document: dict[str, str] = {}
    if keys:
        file = folder / "keys.yaml"
        document = {scope: create_key(file, scope, [scope], created=0) for scope in SCOPES}
        more["access"] = AccessSettings(keys_file=file)
    repository = RepositorySettings(mode="explicit", load_models=("*",))
    repositories = () if models is None else (str(models),)
    kv_transfer = KvTransferSettings("prefill")  # it has a route more
    more.setdefault(
        "engine", EngineSettings(repositories=repositories, repository=repository, gpus=0, kv_transfer=kv_transfer)
    )

    more.setdefault("openai", OpenAiSettings(batch_folder=folder / "batches"))

    async def build() -> Site:
        settings = server_settings(**more)
        engine = open_engine(settings.engine)
        protocols = build_protocols(engine, settings, NO_TRACING, None)
        protocols.start()
        await engine.start()
        created.extend((protocols, engine))
        return protocols.site

    with serving(build) as server:
        try:
            yield Served(server, created[0], created[1], document)
        finally:
            server.call(created[1].close, 1.0)
            server.call(created[0].close)


def gateway_path(path: str, org: str = ORG) -> str:
    """A path of the gateway, with an organisation, an experiment and a job."""
    return path.replace("{}", org, 1).replace("{}", EXPERIMENT, 1).replace("{}", JOB, 1)


def microservice_routes(folder: Path) -> Routes:
    """Those of a service whose model is never brought."""
    settings = MicroserviceSettings("job", str(folder), Address("127.0.0.1"), folder=folder, profile=profile_named(""))
    return microservice_site(Microservice(settings, SystemClock())).routes


def router_routes() -> Routes:
    """Those of a router before one backend."""
    settings = RouterSettings((BackendAddress.parse("http://127.0.0.1:1"),))
    return build_router_site(RouterProxy(settings), None, RouterAppSettings(settings, _HERE)).routes


def fleet_servers(folder: Path, sight: Any = _NOTHING) -> dict[str, HttpServer]:
    """Those of the operator, its webhooks, the model agent and the fleet of one machine, not started."""
    identity: Any = SimpleNamespace(files=None)
    reviews = WebhookMetrics(Registry(SystemClock()), lambda: 0.0)
    control = ApiServer(LocalSettings(folder), _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING)
    return {
        "operator": metrics_server(OperatorMetrics(_NOTHING), _HERE),
        "agent": metrics_server(AgentMetrics(_NOTHING), _HERE),
        "webhooks": webhook_server(_HERE, identity, lambda: sight, reviews),
        "local fleet": control.server(),
        "fleet console": console_server(control, "key", _HERE),
    }


class RunningVerb(Program):
    """A verb in a process of its own, whose log tells its port."""

    _port = 0

    @property
    def port(self) -> int:
        return self._port

    def command_lines(self) -> str:
        """What `ps` shows of it and of all that it has started."""
        own = psutil.Process(self.pid)
        return "\n".join(" ".join(process.cmdline()) for process in (own, *own.children(recursive=True)))


@contextmanager
def program(
    log: Path,
    *arguments: str | Path,
    ready: str,
    python: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[RunningVerb]:
    """Start a verb and wait for a line of its log whose first group is its port; it has to live to the end."""
    running = RunningVerb(
        *arguments,
        log=log,
        command=(sys.executable, *python, HEADRACE),
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})},
    )
    with running:
        running._port = int(running.wait_for(re.compile(ready))[1])
        yield running
        # No `assert`: these files are run under `python -O`, too, where only those of tests are left.
        if running.process.poll() is not None:
            raise RuntimeError(f"it has ended:\n{running.log}")


class Fleet:
    """`headrace up`: its page by a port and a key, its verbs by a UNIX socket."""

    def __init__(self, running: RunningVerb, root: Path) -> None:
        self.running, self.root, self.port = running, root, running.port
        (self.key,) = set(re.findall(r"/console#key=(\S+)", running.log))

    def page(self, method: str, path: str, body: bytes = b"", *fields: bytes) -> Answer:
        """By who has the key."""
        return ask(self.port, method, path, body, (b"authorization: Bearer " + self.key.encode(), *fields))

    def verb(self, name: str, body: bytes = b"{}", *fields: bytes, length: int | None = None) -> Answer:
        """By its owner."""
        head = [b"POST /v1/" + name.encode() + b" HTTP/1.1", b"host: test", b"connection: close", *fields]
        head.append(b"content-length: %d" % (len(body) if length is None else length))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self.root / SOCKET))
            return send_raw(connection, b"\r\n".join([*head, b"", b""]) + body)

    def files(self) -> dict[str, str]:
        """All that lies around its folder, and the names of what is in it: what its documents say changes by itself."""
        files = [path for path in sorted(self.root.parent.rglob("*")) if path.is_file() and path.name != "events.json"]
        around = {path: path.read_bytes() for path in files if self.root not in path.parents and path.name != "told"}
        return {str(path): hashlib.sha256(around.get(path, b"")).hexdigest() for path in files}


@contextmanager
def fleet_up(folder: Path) -> Iterator[Fleet]:
    """The fleet of a machine, with nothing applied to it."""
    arguments = ("up", "--state-dir", folder / "state", "--port", str(free_port()), "--console", "127.0.0.1:0")
    with program(folder / "told", *arguments, ready=r"http://127\.0\.0\.1:(\d+)/console#key=\S") as running:
        yield Fleet(running, folder / "state")
