# SPDX-License-Identifier: Apache-2.0
"""The model repository: index, load and unload, over HTTP and gRPC; over HTTP also sleep and wake.

Loading takes long, so it runs as a task; the request is answered when it ends. It continues if the client disconnects.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from headrace.api.v2.grpc_messages import SERVICE, inference_schema, parse
from headrace.api.v2.http_codec import parse_body, respond_json
from headrace.api.v2.shared_state import V2State
from headrace.backends.contract import SleepLevel
from headrace.core.errors import Internal, InvalidArgument, Unavailable
from headrace.core.names import check_name
from headrace.engine.repository.control import IndexEntry
from headrace.engine.sleep import SleepReport
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_EMPTY, Buffer, parse_query
from headrace.net.http.routes import Routes, Scope

_FILE = "file:"
_MOST_LOAD_BYTES = (1 << 31) - 1
"""Characters of a file in a load request. Triton's limit."""


Work = Callable[[Any, Any], Coroutine[Any, Any, None]]


class V2Repository:
    """HTTP handlers over one data plane."""

    def __init__(self, shared: V2State) -> None:
        self._plane = shared.plane
        self._gate = shared.http_gate
        # The event loop keeps only weak references to tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        api, path = "model-repository", "/v2/repository"
        routes.add("POST", f"{path}/index", self._gate.http(api, self.index), scope="read")
        routes.add("POST", f"{path}/models/{{model}}/load", self._gate.http(api, self.load), scope="admin")
        routes.add("POST", f"{path}/models/{{model}}/unload", self._gate.http(api, self.unload), scope="admin")
        # A path of its own, since Triton has none for it; with the rights and restrictions of the others.
        routes.add("POST", "/v1/models/{model}/sleep", self._gate.http(api, self.sleep), scope="admin")
        routes.add("POST", "/v1/models/{model}/wake", self._gate.http(api, self.wake), scope="admin")

    def index(self, exchange: Exchange) -> None:
        """Return all models of the repository with the states of their versions."""
        ready_only = _flag(parse_body(exchange.body), "ready")

        async def work() -> None:
            respond_json(exchange, [_entry(entry) for entry in await self._plane.index(ready_only=ready_only)])

        self._start(exchange, work())

    def load(self, exchange: Exchange) -> None:
        """Load or reload a model."""
        name = _model_name(exchange.params[0])
        body, exchange.body = exchange.body, b""

        async def work() -> None:
            # Decoding the files of a large model would block the event loop.
            config, files = await asyncio.to_thread(_load_parameters, body)
            await self._plane.load(name, config, files)
            exchange.respond(OK_EMPTY)

        self._start(exchange, work())

    def unload(self, exchange: Exchange) -> None:
        """Unload a model."""
        name = _model_name(exchange.params[0])
        dependents = _flag(_parameters(exchange.body), "unload_dependents")

        async def work() -> None:
            await self._plane.unload(name, unload_dependents=dependents)
            exchange.respond(OK_EMPTY)

        self._start(exchange, work())

    def sleep(self, exchange: Exchange) -> None:
        """Put a model to sleep: `{"level": 1}` or `?level=2`."""
        name = _model_name(exchange.params[0])
        level = _level(parse_body(exchange.body), parse_query(exchange.head.query))

        async def work() -> None:
            respond_json(exchange, _sleep_json(name, await self._plane.sleep(name, level)))

        self._start(exchange, work())

    def wake(self, exchange: Exchange) -> None:
        """Wake a model."""
        name = _model_name(exchange.params[0])

        async def work() -> None:
            respond_json(exchange, _sleep_json(name, await self._plane.wake(name)))

        self._start(exchange, work())

    def _start(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                exchange.fail(Unavailable("the server is stopping"))
            elif (error := task.exception()) is not None:
                exchange.fail(error)

        task.add_done_callback(done)


def _entry(entry: IndexEntry) -> dict[str, str]:
    """Return an index entry; like Triton, without empty members."""
    members = {
        "name": entry.name,
        "version": entry.version,
        "state": entry.state.value if entry.state is not None else "",
        "reason": entry.reason,
    }
    return {key: value for key, value in members.items() if value}


def _level(document: Mapping[str, Any], query: Mapping[str, str]) -> SleepLevel:
    """Return the level of a sleep request, 1 if none is given."""
    value = document.get("level", query.get("level", 1))
    unknown = [name for name in {**document, **query} if name != "level"]
    if unknown:
        raise InvalidArgument(f"unknown member {unknown[0][:64]!a}: a sleep request may have 'level'")
    if value in ("1", "2"):
        value = int(value)
    if isinstance(value, bool) or value not in (1, 2):
        raise InvalidArgument(
            f"level must be 1 (weights in host memory) or 2 (weights dropped and read again), not {str(value)[:32]!a}"
        )
    return 1 if value == 1 else 2


def _sleep_json(name: str, reports: Mapping[str, SleepReport]) -> dict[str, Any]:
    return {
        "model": name,
        "versions": {
            version: {
                "state": report.state,
                "level": report.level,
                "freed_bytes": dict(report.freed or {}),
                "seconds": report.seconds,
            }
            for version, report in reports.items()
        },
    }


def _model_name(text: str) -> str:
    """Return a model's name, after Triton's checks and ours."""
    if not text:
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if "/" in text or "\\" in text or text in (".", ".."):
        raise InvalidArgument(f"model name must not contain path traversal characters: {text[:64]!a}")
    return check_name(text)


def _parameters(body: Buffer) -> dict[str, Any]:
    parameters = parse_body(body).get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidArgument("'parameters' must be a JSON object")
    return parameters


def _flag(document: dict[str, Any], name: str) -> bool:
    value = document.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"invalid value for '{name}': expected a boolean")  # Triton's
    return value


def _load_parameters(body: Buffer) -> tuple[str | None, dict[str, bytes]]:
    if memoryview(body).nbytes > _MOST_LOAD_BYTES:  # Triton's words and status; no JSON reader takes as much
        raise Internal(
            "the load request exceeds the maximum allowed data size limit INT_MAX: put the files into the model repository"
        )
    return load_parameters(_parameters(body))


def load_parameters(parameters: Mapping[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    """Return the configuration and the files of a load request. Files are bytes, or strings in base64."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in parameters.items():
        if name != "config" and not name.startswith(_FILE):
            raise InvalidArgument(
                f"unknown parameter {name[:64]!a}: a load request may have 'config' and 'file:<version>/<name>'"
            )
        if isinstance(value, bytes) and name != "config":
            files[name] = value
            continue
        if not isinstance(value, str):
            raise InvalidArgument(f"parameter {name[:64]!a} must be a string")
        if name == "config":
            config = value
        else:
            files[name] = _decode_file(name, value)
    return config, files


def _decode_file(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"parameter {name[:64]!a} must be the file's content in base64") from None


class GrpcRepository:
    """gRPC methods over one data plane."""

    def __init__(self, shared: V2State) -> None:
        self._plane = shared.plane
        self._gate = shared.grpc_gate
        # The event loop keeps only weak references to tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, services: Services) -> None:
        """Register the methods."""
        methods: dict[str, tuple[Work, Scope]] = {
            "RepositoryIndex": (self.index, "read"),
            "RepositoryModelLoad": (self.load, "admin"),
            "RepositoryModelUnload": (self.unload, "admin"),
        }
        for method, (work, scope) in methods.items():
            handler = self._gate.grpc("model-repository", self._handler(method, work))
            services.unary(SERVICE, method, handler, scope=scope)

    async def index(self, request: Any, response: Any) -> None:
        """Return all models of the repository with the states of their versions."""
        for entry in await self._plane.index(ready_only=request.ready):
            state = entry.state.value if entry.state is not None else ""
            response.models.add(name=entry.name, version=entry.version, state=state, reason=entry.reason)

    async def load(self, request: Any, response: Any) -> None:
        """Load or reload a model."""
        parameters = {name: _value(parameter) for name, parameter in request.parameters.items()}
        config, files = load_parameters(parameters)
        await self._plane.load(_model_name(request.model_name), config, files)

    async def unload(self, request: Any, response: Any) -> None:
        """Unload a model."""
        parameters = {name: _value(parameter) for name, parameter in request.parameters.items()}
        dependents = parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument("invalid value for 'unload_dependents': expected a boolean")
        await self._plane.unload(_model_name(request.model_name), unload_dependents=dependents)

    def _handler(self, method: str, work: Work) -> Callable[[GrpcCall, Buffer], None]:
        schema = inference_schema()
        request_class = schema.message(f"inference.{method}Request")
        response_class = schema.message(f"inference.{method}Response")

        def handle(call: GrpcCall, message: Buffer) -> None:
            request, response = parse(request_class, message), response_class()
            if request.repository_name:
                raise InvalidArgument("'repository_name' specification is not supported")  # Triton's

            def done(task: asyncio.Task[None]) -> None:
                self._tasks.discard(task)
                if task.cancelled():
                    call.fail(Unavailable("the server is stopping"))
                elif (error := task.exception()) is not None:
                    call.fail(error)
                else:
                    call.reply(response.SerializeToString())

            task = asyncio.get_running_loop().create_task(work(request, response))
            self._tasks.add(task)
            task.add_done_callback(done)

        return handle


def _value(parameter: Any) -> Any:
    return getattr(parameter, parameter.WhichOneof("parameter_choice") or "bool_param")
