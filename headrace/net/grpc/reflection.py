# SPDX-License-Identifier: Apache-2.0
"""Server reflection (v1 and v1alpha), so that grpcurl, grpc_cli and Postman can list and describe the services."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FileDescriptor
from google.protobuf.message import DecodeError

from headrace.core.errors import InvalidArgument
from headrace.core.schemas import Schema
from headrace.net.grpc.schema import grpc_schema
from headrace.net.grpc.services import Services
from headrace.net.grpc.status import Status
from headrace.net.grpc.streaming import CoroutineCalls, MessageStream


class ReflectionService:
    """Answers from the descriptors of the given schemas."""

    def __init__(self, services: Services, schemas: Sequence[Schema]) -> None:
        self._services = services
        self._calls = CoroutineCalls()
        self._files: dict[str, FileDescriptor] = {}
        self._symbols: dict[str, FileDescriptor] = {}
        for schema in (*schemas, grpc_schema()):
            for file in schema.files:
                self._index(file)

    def add_to(self, services: Services) -> None:
        """Serve both versions."""
        for version in ("v1", "v1alpha"):
            package = f"grpc.reflection.{version}"
            answering = _Answering(self, package)
            services.streaming(f"{package}.ServerReflection", "ServerReflectionInfo", self._calls.serve(answering.run))

    def service_names(self) -> list[str]:
        """What `list` shows."""
        return sorted(self._services.names)

    def file_named(self, name: str) -> FileDescriptor | None:
        """A file by its name."""
        return self._files.get(name)

    def file_with(self, symbol: str) -> FileDescriptor | None:
        """The file that defines a service, method, message, field, oneof, enum or enum value."""
        return self._symbols.get(symbol)

    def _index(self, file: FileDescriptor) -> None:
        self._files.setdefault(file.name, file)
        named: list[Any] = []
        for service in file.services_by_name.values():
            named += [service, *service.methods]
        enums = list(file.enum_types_by_name.values())
        pending = list(file.message_types_by_name.values())
        while pending:
            message = pending.pop()
            named += [message, *message.fields, *message.oneofs]
            enums += message.enum_types
            pending += message.nested_types
        for name in (*(one.full_name for one in named), *_enum_names(enums)):
            self._symbols.setdefault(name, file)


def _enum_names(enums: Iterable[EnumDescriptor]) -> Iterator[str]:
    for enum in enums:
        yield enum.full_name
        # The values are siblings of their enum, as in C++.
        scope = enum.full_name.rpartition(".")[0]
        yield from (f"{scope}.{value.name}" for value in enum.values)


class _Answering:
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
        asked = request.WhichOneof("message_request")
        if asked == "list_services":
            for name in self._reflection.service_names():
                response.list_services_response.service.add(name=name)
        elif asked == "file_by_filename":
            self._send_file(response, self._reflection.file_named(request.file_by_filename), request.file_by_filename)
        elif asked == "file_containing_symbol":
            symbol = request.file_containing_symbol
            self._send_file(response, self._reflection.file_with(symbol), symbol)
        elif asked == "all_extension_numbers_of_type":
            name = request.all_extension_numbers_of_type
            if self._reflection.file_with(name) is None:
                self._not_found(response, name)
            else:
                response.all_extension_numbers_response.base_type_name = name
        elif asked == "file_containing_extension":
            # proto3 services have no extensions.
            self._not_found(response, "extension")
        else:
            response.error_response.error_code = Status.INVALID_ARGUMENT
            response.error_response.error_message = "the request asks for nothing that this server knows"

    def _send_file(self, response: Any, file: FileDescriptor | None, name: str) -> None:
        if file is None:
            self._not_found(response, name)
            return
        seen: dict[str, bytes] = {}
        pending = [file]
        while pending:
            one = pending.pop()
            if one.name not in seen:
                seen[one.name] = one.serialized_pb
                pending += one.dependencies
        response.file_descriptor_response.file_descriptor_proto.extend(seen.values())

    def _not_found(self, response: Any, name: str) -> None:
        response.error_response.error_code = Status.NOT_FOUND
        response.error_response.error_message = f"not found: {name[:256]}"
