# SPDX-License-Identifier: Apache-2.0
"""v1 over HTTP: loading and unloading of models, the repository's index, and regions of shared memory.

Registered by `http`. Loading takes as long as it takes, so it is a coroutine; a client that goes away does not stop it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable
from typing import Any

from headrace.api.v1.accounts import V1Accounts
from headrace.api.v1.replies import BAD, answer_empty, answer_message
from headrace.api.v1.schema import message_class
from headrace.api.v1.shared_memory import SharedMemory, control, described, granted
from headrace.core.errors import Unavailable
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Buffer, Exchange
from headrace.net.http.routes import Routes

_SHM = "/api/sharedmemorycontrol"
_CUDA_HANDLE_BYTES = 64
_LARGEST = (1 << 63) - 1


class V1HttpControl:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, accounts: V1Accounts, memory: SharedMemory | None) -> None:
        self._plane = plane
        self._accounts = accounts
        self._memory = memory
        # A task nobody refers to may be collected while it runs.
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        routes.add("POST", "/api/modelcontrol/load/{model}", self.load)
        routes.add("POST", "/api/modelcontrol/unload/{model}", self.unload)
        routes.add("GET", "/api/repository/index", self.index)
        # A key mostly begins with a slash, which clients put into the path as it is.
        for slash in ("/", "//"):
            routes.add("POST", f"{_SHM}/register/{{name}}{slash}{{key}}/{{offset}}/{{size}}", self.register)
        routes.add("POST", f"{_SHM}/cudaregister/{{name}}/{{device}}/{{size}}", self.register_cuda)
        routes.add("POST", f"{_SHM}/unregister/{{name}}", self.unregister)
        routes.add("POST", f"{_SHM}/unregisterall", self.unregister_all)
        for method in ("GET", "POST"):
            routes.add(method, f"{_SHM}/status", self.memory_status)

    def load(self, exchange: Exchange) -> None:
        """Load a model, or load it anew."""
        self._start(exchange, "model_control", self._plane.load(exchange.params[0]))

    def unload(self, exchange: Exchange) -> None:
        """Stop serving a model."""
        self._start(exchange, "model_control", self._plane.unload(exchange.params[0]))

    def index(self, exchange: Exchange) -> None:
        """The names of all models in the repository."""
        self._start(exchange, "repository", repository_index(self._plane))

    def register(self, exchange: Exchange) -> None:
        """Map part of a shared memory object of the system."""
        name, key, offset, size = exchange.params
        slash = "/" if b"//" in exchange.head.path else ""
        if not (_is_number(offset) and _is_number(size)):
            exchange.respond(BAD)
            return
        request = message_class("SharedMemoryControlRequest")()
        request.register.name = name
        request.register.byte_size = int(size)
        request.register.system_shared_memory.shared_memory_key = slash + key
        request.register.system_shared_memory.offset = int(offset)
        self._control_memory(exchange, request)

    def register_cuda(self, exchange: Exchange) -> None:
        """Map memory of a GPU; the handle is the body, as it is or in base64."""
        name, device, size = exchange.params
        if not (_is_number(device) and _is_number(size)):
            exchange.respond(BAD)
            return
        request = message_class("SharedMemoryControlRequest")()
        request.register.name = name
        request.register.byte_size = int(size)
        request.register.cuda_shared_memory.device_id = int(device)
        request.register.cuda_shared_memory.raw_handle = _handle(exchange.body)
        self._control_memory(exchange, request)

    def unregister(self, exchange: Exchange) -> None:
        """Let go of a region."""
        request = message_class("SharedMemoryControlRequest")()
        request.unregister.name = exchange.params[0]
        self._control_memory(exchange, request)

    def unregister_all(self, exchange: Exchange) -> None:
        """Let go of all regions."""
        request = message_class("SharedMemoryControlRequest")()
        request.unregister_all.SetInParent()
        self._control_memory(exchange, request)

    def memory_status(self, exchange: Exchange) -> None:
        """All regions."""
        since = self._accounts.now()
        number = self._accounts.next_id()
        try:
            regions = described(granted(self._memory))
        except Exception as error:
            answer_empty(exchange, self._accounts.status_text(number, error), good=False)
            return
        self._accounts.succeeded("shm", since)
        message = message_class("SharedMemoryStatus")(shared_memory_region=regions)
        answer_message(exchange, self._accounts.status_text(number), message)

    def _control_memory(self, exchange: Exchange, request: Any) -> None:
        since = self._accounts.now()
        number = self._accounts.next_id()
        try:
            control(self._memory, request)
        except Exception as error:
            answer_empty(exchange, self._accounts.status_text(number, error), good=False)
            return
        self._accounts.succeeded("shm", since)
        answer_empty(exchange, self._accounts.status_text(number), good=True)

    def _start(self, exchange: Exchange, kind: str, work: Awaitable[Any]) -> None:
        since = self._accounts.now()
        number = self._accounts.next_id()

        async def run() -> None:
            message = await work
            self._accounts.succeeded(kind, since)
            if message is None:
                answer_empty(exchange, self._accounts.status_text(number), good=True)
            else:
                answer_message(exchange, self._accounts.status_text(number), message)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = Unavailable("the server is stopping") if task.cancelled() else task.exception()
            if error is not None:
                answer_empty(exchange, self._accounts.status_text(number, error), good=False)

        task.add_done_callback(done)


async def repository_index(plane: DataPlane) -> Any:
    """A ModelRepositoryIndex: each model once, loaded or not."""
    names = dict.fromkeys(entry.name for entry in await plane.index())
    message = message_class("ModelRepositoryIndex")()
    for name in names:
        message.models.add(name=name)
    return message


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _LARGEST


def _handle(body: Buffer) -> bytes:
    data = bytes(body)
    if len(data) == _CUDA_HANDLE_BYTES:
        return data
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return data  # whoever opens it says what is wrong with it
