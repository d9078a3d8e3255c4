# SPDX-License-Identifier: Apache-2.0
"""v2 over gRPC: the repository's index, and loading and unloading of models.

Registered by `grpc`. As over HTTP (`repository`), a client that goes away does not stop a load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.api.v2.grpc_messages import parse
from headrace.api.v2.repository import load_parameters
from headrace.api.v2.schema import SERVICE, inference_schema
from headrace.api.v2.shared import V2Shared
from headrace.core.errors import InvalidArgument, Unavailable
from headrace.core.names import check_name
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Buffer

Work = Callable[[Any, Any], Coroutine[Any, Any, None]]


class GrpcRepository:
    """Methods over one data plane."""

    def __init__(self, shared: V2Shared) -> None:
        self._plane = shared.plane
        self._gate = shared.grpc_gate
        # A task nobody refers to may be collected while it runs.
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, services: Services) -> None:
        """Serve the methods."""
        methods = {"Index": self.index, "ModelLoad": self.load, "ModelUnload": self.unload}
        for name, work in methods.items():
            method = f"Repository{name}"
            services.unary(SERVICE, method, self._gate.grpc("model-repository", self._handler(method, work)))

    async def index(self, request: Any, response: Any) -> None:
        """Every model of the repository and where its versions stand."""
        for each in await self._plane.index(ready_only=request.ready):
            state = each.state.value if each.state is not None else ""
            response.models.add(name=each.name, version=each.version, state=state, reason=each.reason)

    async def load(self, request: Any, response: Any) -> None:
        """Load a model, or load it anew."""
        given = {name: _value(parameter) for name, parameter in request.parameters.items()}
        config, files = load_parameters(given)
        await self._plane.load(check_name(request.model_name), config, files)

    async def unload(self, request: Any, response: Any) -> None:
        """Stop serving a model."""
        given = {name: _value(parameter) for name, parameter in request.parameters.items()}
        dependents = given.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument("'unload_dependents' must be true or false")
        await self._plane.unload(check_name(request.model_name), unload_dependents=dependents)

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
