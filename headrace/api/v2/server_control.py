# SPDX-License-Identifier: Apache-2.0
"""Trace settings, log settings and shared memory, over HTTP and gRPC."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from headrace.api.v2.grpc_messages import UnaryMethods
from headrace.api.v2.http_codec import parse_body, respond_json
from headrace.api.v2.shared_state import V2State
from headrace.core.errors import InvalidArgument
from headrace.core.names import check_name
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_EMPTY
from headrace.net.http.routes import Routes

_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
_LOG_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}


class V2ServerSettings:
    """HTTP handlers of the trace and log settings."""

    def __init__(self, shared: V2State) -> None:
        self._gate = shared.http_gate
        self._tracing = shared.tracing
        self._logs = shared.logs

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        for path in ("/v2/trace/setting", "/v2/models/{model}/trace/setting"):
            routes.add("GET", path, self._gate.http("trace", self.trace), scope="read")
            routes.add("POST", path, self._gate.http("trace", self.change_trace), scope="admin", workers="all")
        change_logging = self._gate.http("logging", self.change_logging)
        routes.add("GET", "/v2/logging", self._gate.http("logging", self.logging), scope="read")
        routes.add("POST", "/v2/logging", change_logging, scope="admin", workers="all")

    def trace(self, exchange: Exchange) -> None:
        """Return the trace settings of a model or of all models."""
        settings = self._tracing.to_json(_model(exchange))
        levels = settings.pop("trace_level")
        respond_json(exchange, {"trace_level": levels, **{name: values[0] for name, values in settings.items()}})

    def change_trace(self, exchange: Exchange) -> None:
        """Change trace settings, and return all of them."""
        changes = {name: _strings(name, value) for name, value in parse_body(exchange.body).items()}
        self._tracing.change(_model(exchange), changes)
        self.trace(exchange)

    def logging(self, exchange: Exchange) -> None:
        """Return the log settings."""
        respond_json(exchange, self._logs.to_json())

    def change_logging(self, exchange: Exchange) -> None:
        """Change log settings, and return all of them."""
        self._logs.change(parse_body(exchange.body))
        self.logging(exchange)


def _model(exchange: Exchange) -> str:
    return check_name(exchange.params[0]) if exchange.params else ""


def _strings(name: str, value: Any) -> Sequence[str] | None:
    """Return a client's value (a string, an integer or a list of strings) as a list; None for null, which resets it."""
    if value is None:
        return None
    if isinstance(value, str):
        return [value]
    if type(value) is int:
        return [str(value)]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise InvalidArgument(f"trace setting {name[:64]!a} must be a string, a list of strings, or null")


class V2SharedMemory:
    """HTTP handlers of shared memory."""

    def __init__(self, shared: V2State) -> None:
        self._memory = shared.memory
        self._gate = shared.http_gate

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        handlers = (
            (_SYSTEM, self.system_status, self.unregister_system, self.register_system),
            (_CUDA, self.cuda_status, self.unregister_cuda, self.register_cuda),
        )
        for path, *gated in handlers:
            status, unregister, register = (self._gate.http("shared-memory", handler) for handler in gated)
            region = f"{path}/region/{{region}}"
            for place in (path, region):
                routes.add("GET", f"{place}/status", status, scope="read")
                routes.add("POST", f"{place}/unregister", unregister, scope="admin", workers="all")
            routes.add("POST", f"{region}/register", register, scope="admin", workers="all")

    def system_status(self, exchange: Exchange) -> None:
        """Return one POSIX region, or all."""
        regions = [
            {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
            for region in self._memory.system_regions(_region(exchange))
        ]
        respond_json(exchange, regions)

    def cuda_status(self, exchange: Exchange) -> None:
        """Return one CUDA region, or all."""
        regions = [
            {"name": region.name, "device_id": region.device_id, "byte_size": region.byte_size}
            for region in self._memory.cuda_regions(_region(exchange))
        ]
        respond_json(exchange, regions)

    def register_system(self, exchange: Exchange) -> None:
        """Register a POSIX region."""
        document = parse_body(exchange.body)
        key = document.get("key")
        if not isinstance(key, str):
            raise InvalidArgument("'key' must be a string: the name that was given to shm_open")
        offset, size = _integer(document, "offset", 0), _integer(document, "byte_size")
        self._memory.register_system(_region(exchange), key, offset, size)
        exchange.respond(OK_EMPTY)

    def register_cuda(self, exchange: Exchange) -> None:
        """Register a CUDA region."""
        document = parse_body(exchange.body)
        handle = document.get("raw_handle")
        text = handle.get("b64") if isinstance(handle, dict) else None
        if not isinstance(text, str):
            raise InvalidArgument('\'raw_handle\' must be an object with the handle in base64: {"b64": "..."}')
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidArgument("the 'b64' of 'raw_handle' is not base64") from None
        device, size = _integer(document, "device_id"), _integer(document, "byte_size")
        self._memory.register_cuda(_region(exchange), raw, device, size)
        exchange.respond(OK_EMPTY)

    def unregister_system(self, exchange: Exchange) -> None:
        """Unregister one POSIX region, or all."""
        self._memory.unregister_system(_region(exchange))
        exchange.respond(OK_EMPTY)

    def unregister_cuda(self, exchange: Exchange) -> None:
        """Unregister one CUDA region, or all."""
        self._memory.unregister_cuda(_region(exchange))
        exchange.respond(OK_EMPTY)


def _region(exchange: Exchange) -> str:
    return exchange.params[0] if exchange.params else ""


def _integer(document: dict[str, Any], name: str, default: int | None = None) -> int:
    value = document.get(name, default)
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"'{name}' must be an integer of 0 or more")
    return value


class GrpcServerMethods:
    """gRPC methods of the settings and of shared memory."""

    def __init__(self, shared: V2State) -> None:
        self._shared = shared
        self._memory = shared.memory
        self._tracing = shared.tracing
        self._logs = shared.logs

    def add_to(self, services: Services) -> None:
        """Register the methods."""
        methods = UnaryMethods(services, self._shared)
        methods.add("shared-memory", "SystemSharedMemoryStatus", self.system_status, scope="read")
        methods.add("shared-memory", "SystemSharedMemoryRegister", self.register_system, scope="admin", workers="all")
        methods.add(
            "shared-memory", "SystemSharedMemoryUnregister", self.unregister_system, scope="admin", workers="all"
        )
        methods.add("shared-memory", "CudaSharedMemoryStatus", self.cuda_status, scope="read")
        methods.add("shared-memory", "CudaSharedMemoryRegister", self.register_cuda, scope="admin", workers="all")
        methods.add("shared-memory", "CudaSharedMemoryUnregister", self.unregister_cuda, scope="admin", workers="all")
        methods.add("trace", "TraceSetting", self.trace, scope="admin", workers="all")
        methods.add("logging", "LogSettings", self.log, scope="admin", workers="all")

    def system_status(self, request: Any, response: Any) -> None:
        """Return one POSIX region, or all."""
        for region in self._memory.system_regions(request.name):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size

    def cuda_status(self, request: Any, response: Any) -> None:
        """Return one CUDA region, or all."""
        for region in self._memory.cuda_regions(request.name):
            status = response.regions[region.name]
            status.name, status.device_id, status.byte_size = region.name, region.device_id, region.byte_size

    def register_system(self, request: Any, response: Any) -> None:
        """Register a POSIX region."""
        self._memory.register_system(request.name, request.key, request.offset, request.byte_size)

    def register_cuda(self, request: Any, response: Any) -> None:
        """Register a CUDA region."""
        self._memory.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)

    def unregister_system(self, request: Any, response: Any) -> None:
        """Unregister one POSIX region, or all."""
        self._memory.unregister_system(request.name)

    def unregister_cuda(self, request: Any, response: Any) -> None:
        """Unregister one CUDA region, or all."""
        self._memory.unregister_cuda(request.name)

    def trace(self, request: Any, response: Any) -> None:
        """Change trace settings, if given, and return all of them."""
        model = check_name(request.model_name) if request.model_name else ""
        changes = {name: list(setting.value) for name, setting in request.settings.items()}
        if changes:
            self._tracing.change(model, changes)
        for name, values in self._tracing.to_json(model).items():
            response.settings[name].value.extend(values)

    def log(self, request: Any, response: Any) -> None:
        """Change log settings, if given, and return all of them."""
        changes = {name: _value(setting) for name, setting in request.settings.items()}
        if changes:
            self._logs.change(changes)
        for name, value in self._logs.to_json().items():
            setattr(response.settings[name], _LOG_FIELDS[type(value)], value)


def _value(setting: Any) -> Any:
    chosen = setting.WhichOneof("parameter_choice")
    return None if chosen is None else getattr(setting, chosen)
