# SPDX-License-Identifier: Apache-2.0
"""Small messages of the v2 service, parsed and answered. Called by the methods that are not infer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from headrace.api.v2.schema import SERVICE, inference_schema
from headrace.api.v2.shared import V2Shared
from headrace.core.errors import InvalidArgument
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Buffer

Answer = Callable[[Any, Any], None]
"""Gets a parsed request and fills an empty response; raises for what cannot be done."""


def parse(message_class: Any, message: Buffer) -> Any:
    """A received message."""
    try:
        return message_class.FromString(message)
    except DecodeError:
        raise InvalidArgument(f"the message is not a {message_class.DESCRIPTOR.name}") from None


class Methods:
    """Registers methods that answer at once, each behind the gate of its part of the protocol."""

    def __init__(self, services: Services, shared: V2Shared) -> None:
        self._services = services
        self._gate = shared.grpc_gate

    def add(self, api: str, method: str, answer: Answer) -> None:
        """Serve a method whose messages are called after it."""
        schema = inference_schema()
        request_class = schema.message(f"inference.{method}Request")
        response_class = schema.message(f"inference.{method}Response")

        def handle(call: GrpcCall, message: Buffer) -> None:
            response = response_class()
            answer(parse(request_class, message), response)
            call.reply(response.SerializeToString())

        self._services.unary(SERVICE, method, self._gate.grpc(api, handle))
