# SPDX-License-Identifier: Apache-2.0
"""The services that every gRPC server has: health checking (`grpc.health.v1`) and reflection (v1 and v1alpha).

Health checking is for probes and load balancers; programs report health through `HealthService.set`, where the empty
name is the whole server. Reflection lets grpcurl, grpc_cli and Postman list and describe the services.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FileDescriptor
from google.protobuf.message import DecodeError

from headrace.core.errors import InvalidArgument, NotFound, Unavailable, Unimplemented
from headrace.core.protobuf import Schema
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import CoroutineCalls, MessageStream, Services
from headrace.net.grpc.status import Status
from headrace.net.http.heads import Buffer

SERVICE = "grpc.health.v1.Health"
SERVING = 1
NOT_SERVING = 2
SERVICE_UNKNOWN = 3


class HealthService:
    """Keeps the status of each service; serves Check and Watch."""

    def __init__(self) -> None:
        schema = grpc_schema()
        self._request = schema.message("grpc.health.v1.HealthCheckRequest")
        self._response = schema.message("grpc.health.v1.HealthCheckResponse")
        self._status: dict[str, int] = {"": SERVING}
        self._changed = asyncio.Event()
        self._ending = False
        self._calls = CoroutineCalls()

    def add_to(self, services: Services) -> None:
        """Register both methods."""
        services.unary(SERVICE, "Check", self._check, scope=None)
        services.streaming(SERVICE, "Watch", self._calls.serve(self._watch), scope=None)

    def set(self, name: str, healthy: bool) -> None:
        """Set whether a service (or, with an empty name, the server) is healthy."""
        self._status[name] = SERVING if healthy else NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    def shut_down(self) -> None:
        """Report everything as unhealthy, and end the watches: they would delay a drain."""
        self._ending = True
        for name in self._status:
            self.set(name, False)

    def _name(self, message: Buffer) -> str:
        try:
            name: str = self._request.FromString(message).service
        except DecodeError:
            raise InvalidArgument("the message is not a HealthCheckRequest") from None
        return name

    def _check(self, call: GrpcCall, message: Buffer) -> None:
        name = self._name(message)
        status = self._status.get(name)
        if status is None:
            raise NotFound(f"unknown service {name[:256]!r}")
        call.reply(self._response(status=status).SerializeToString())

    async def _watch(self, stream: MessageStream) -> None:
        message = await stream.receive()
        if message is None:
            raise Unimplemented("Watch takes one message, not none")
        name = self._name(message)
        last = None
        while True:
            changed = self._changed
            status = self._status.get(name, SERVICE_UNKNOWN)
            if status != last:
                last = status
                await stream.send(self._response(status=status).SerializeToString())
            if self._ending:
                raise Unavailable("the server is shutting down")
            await changed.wait()


class ReflectionService:
    """Serves reflection from the descriptors of the given schemas."""

    def __init__(self, services: Services, schemas: Sequence[Schema]) -> None:
        self._services = services
        self._calls = CoroutineCalls()
        self._files: dict[str, FileDescriptor] = {}
        self._symbols: dict[str, FileDescriptor] = {}
        for schema in (*schemas, grpc_schema()):
            for file in schema.files:
                self._index(file)

    def add_to(self, services: Services) -> None:
        """Register both versions."""
        for version in ("v1", "v1alpha"):
            package = f"grpc.reflection.{version}"
            api = _ReflectionApi(self, package)
            services.streaming(
                f"{package}.ServerReflection", "ServerReflectionInfo", self._calls.serve(api.run), scope="read"
            )

    def service_names(self) -> list[str]:
        """Return the names of all services, sorted."""
        return sorted(self._services.names)

    def file_named(self, name: str) -> FileDescriptor | None:
        """Return a file by its name."""
        return self._files.get(name)

    def file_with(self, symbol: str) -> FileDescriptor | None:
        """Return the file that defines a service, method, message, field, oneof, enum or enum value."""
        return self._symbols.get(symbol)

    def _index(self, file: FileDescriptor) -> None:
        self._files.setdefault(file.name, file)
        descriptors: list[Any] = []
        for service in file.services_by_name.values():
            descriptors += [service, *service.methods]
        enums = list(file.enum_types_by_name.values())
        pending = list(file.message_types_by_name.values())
        while pending:
            message = pending.pop()
            descriptors += [message, *message.fields, *message.oneofs]
            enums += message.enum_types
            pending += message.nested_types
        for name in (*(descriptor.full_name for descriptor in descriptors), *_enum_names(enums)):
            self._symbols.setdefault(name, file)


def _enum_names(enums: Iterable[EnumDescriptor]) -> Iterator[str]:
    for enum in enums:
        yield enum.full_name
        # The values are siblings of their enum, as in C++.
        scope = enum.full_name.rpartition(".")[0]
        yield from (f"{scope}.{value.name}" for value in enum.values)


class _ReflectionApi:
    """One version of the protocol: same fields, another package."""

    def __init__(self, reflection: ReflectionService, package: str) -> None:
        self._reflection = reflection
        schema = grpc_schema()
        self._request = schema.message(f"{package}.ServerReflectionRequest")
        self._response = schema.message(f"{package}.ServerReflectionResponse")

    async def run(self, stream: MessageStream) -> None:
        async for message in stream:
            try:
                request = self._request.FromString(message)
            except DecodeError:
                raise InvalidArgument("the message is not a ServerReflectionRequest") from None
            response = self._response(valid_host=request.host, original_request=request)
            self._answer(request, response)
            await stream.send(response.SerializeToString())

    def _answer(self, request: Any, response: Any) -> None:
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for name in self._reflection.service_names():
                response.list_services_response.service.add(name=name)
        elif kind == "file_by_filename":
            self._send_file(response, self._reflection.file_named(request.file_by_filename), request.file_by_filename)
        elif kind == "file_containing_symbol":
            symbol = request.file_containing_symbol
            self._send_file(response, self._reflection.file_with(symbol), symbol)
        elif kind == "all_extension_numbers_of_type":
            name = request.all_extension_numbers_of_type
            if self._reflection.file_with(name) is None:
                self._not_found(response, name)
            else:
                response.all_extension_numbers_response.base_type_name = name
        elif kind == "file_containing_extension":
            # proto3 services have no extensions.
            self._not_found(response, "extension")
        else:
            response.error_response.error_code = Status.INVALID_ARGUMENT
            response.error_response.error_message = "the request asks for nothing that this server supports"

    def _send_file(self, response: Any, file: FileDescriptor | None, name: str) -> None:
        if file is None:
            self._not_found(response, name)
            return
        seen: dict[str, bytes] = {}
        pending = [file]
        while pending:
            dependency = pending.pop()
            if dependency.name not in seen:
                seen[dependency.name] = dependency.serialized_pb
                pending += dependency.dependencies
        response.file_descriptor_response.file_descriptor_proto.extend(seen.values())

    def _not_found(self, response: Any, name: str) -> None:
        response.error_response.error_code = Status.NOT_FOUND
        response.error_response.error_message = f"not found: {name[:256]}"


@cache
def grpc_schema() -> Schema:
    """Return the messages of both services; loaded at first use."""
    return Schema((files("headrace.net.grpc") / "_generated" / "grpc.binpb").read_bytes())
