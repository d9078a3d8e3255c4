# SPDX-License-Identifier: Apache-2.0
"""The protobuf schema of v2, and helpers for methods with small messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf.message import DecodeError

from headrace.api.model_waits import waiting_unary
from headrace.api.v2.shared_state import V2State
from headrace.core.errors import InvalidArgument
from headrace.core.protobuf import Schema
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.heads import Buffer
from headrace.net.http.routes import Scope, Workers

FillResponse = Callable[[Any, Any], None]
"""Gets a parsed request and fills an empty response; raises errors."""


SERVICE = "inference.GRPCInferenceService"


def parse(message_class: Any, message: Buffer) -> Any:
    """Parse a received message."""
    try:
        return message_class.FromString(message)
    except DecodeError:
        raise InvalidArgument(f"the message is not a {message_class.DESCRIPTOR.name}") from None


class UnaryMethods:
    """Registers methods that respond at once, each with the gate of its API."""

    def __init__(self, services: Services, shared: V2State) -> None:
        self._services = services
        self._plane = shared.plane
        self._gate = shared.grpc_gate

    def add(
        self,
        api: str,
        method: str,
        answer: FillResponse,
        *,
        scope: Scope,
        workers: Workers = "one",
        needs_model: bool = False,
    ) -> None:
        """Register a method whose messages are named after it; `needs_model`: one that loads on demand is loaded for it."""
        schema = inference_schema()
        request_class = schema.message(f"inference.{method}Request")
        response_class = schema.message(f"inference.{method}Response")

        def handle(call: GrpcCall, message: Buffer) -> None:
            response = response_class()
            answer(parse(request_class, message), response)
            call.reply(response.SerializeToString())

        handler = waiting_unary(self._plane, handle) if needs_model else handle
        self._services.unary(SERVICE, method, self._gate.grpc(api, handler), scope=scope, workers=workers)


@cache
def inference_schema() -> Schema:
    """Return the protobuf schema, loaded at first use."""
    return Schema((files("headrace.api.v2") / "_generated" / "inference.binpb").read_bytes())
