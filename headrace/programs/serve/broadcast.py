# SPDX-License-Identifier: Apache-2.0
"""Broadcast control requests to every worker: log and trace settings, shared memory, traffic, model loading."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from typing import Any, cast

import orjson

from headrace.core.errors import HeadraceError, with_message
from headrace.core.files import FileLock, write_atomically
from headrace.core.names import check_name
from headrace.engine.dataplane import DataPlane
from headrace.net.grpc.call import GrpcCall, UnaryHandler
from headrace.net.http.exchange import Body, Exchange, Handler
from headrace.net.http.heads import Fields, RequestHead, ResponseHead
from headrace.programs.serve.worker_channel import WorkerChannel, WorkerUnavailable

log = logging.getLogger("headrace.apps")

_REPEAT, _HISTORY = "repeat", "history"
_TIMEOUT_SECONDS = 5.0
_REMEMBERED = 4096
"""Requests kept for workers that start later; beyond this, the oldest are dropped."""

BroadcastRequest = dict[str, Any]
"""A control request, as JSON."""


class Broadcaster:
    """Sends control requests of this worker to all others, and handles theirs."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel
        self._handlers: dict[str, Handler | UnaryHandler] = {}
        self._remembered_names: set[str] = set()
        self._history: dict[str, BroadcastRequest] = {}

    def start(self) -> None:
        """Start handling requests that other workers broadcast."""
        self._channel.register_handler(_REPEAT, self._repeat)
        self._channel.register_handler(_HISTORY, self._answer_history)

    async def catch_up(self) -> None:
        """Repeat the requests that were broadcast before this worker started."""
        answers = await self._channel.request_all(_HISTORY, seconds=_TIMEOUT_SECONDS)
        missed = [answer for answer in answers.values() if isinstance(answer, list)]
        for request in max(missed, key=len, default=[]):
            await self._repeat(request)

    def register(self, name: str, handler: Handler | UnaryHandler, *, remember: bool = True) -> None:
        """Register a handler for broadcast requests of this name; `remember` them for workers that start later."""
        self._handlers[name] = handler
        if remember:
            self._remembered_names.add(name)

    def lock(self) -> AbstractAsyncContextManager[None]:
        """Return a lock that all workers share, so that simultaneous requests are applied in the same order everywhere."""
        return FileLock(self._channel.folder / "repeating.lock").hold()

    async def broadcast(
        self, name: str, head: RequestHead, body: bytes, params: tuple[str, ...] = (), *, include_self: bool = False
    ) -> None:
        """Broadcast a request to all other workers, and with `include_self` to this one. One that is down gets it later."""
        request = {
            "name": name,
            "method": head.method.decode("latin-1"),
            "target": head.path.decode("latin-1"),
            "fields": [[key.decode("latin-1"), value.decode("latin-1")] for key, value in head.fields],
            "version": head.version,
            "body": base64.b64encode(body).decode(),
            "params": params,
        }
        self._remember(request)
        await self._channel.request_all(_REPEAT, request, seconds=_TIMEOUT_SECONDS)
        if include_self:
            await self._repeat({**request, "params": list(params)})

    async def _answer_history(self, _arguments: Any) -> list[BroadcastRequest]:
        return list(self._history.values())

    async def _repeat(self, request: BroadcastRequest) -> None:
        self._remember(request)
        handler = self._handlers[request["name"]]
        fields = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in request["fields"]]
        target = request["target"].encode("latin-1")
        head = RequestHead(request["method"].encode("latin-1"), target, fields, version=request["version"])
        body = base64.b64decode(request["body"])
        answered = asyncio.Event()
        if request["name"].startswith("/"):
            call = cast("GrpcCall", _QuietCall(head, answered.set))
            _call_handler(lambda: cast("UnaryHandler", handler)(call, body), call.fail)
        else:
            exchange = _QuietExchange(head, body, tuple(request["params"]), answered.set)
            _call_handler(lambda: cast("Handler", handler)(exchange), exchange.fail)
        await answered.wait()

    def _remember(self, request: BroadcastRequest) -> None:
        if request["name"] not in self._remembered_names:
            return
        # Registering and unregistering a region change the same thing: only the last request counts.
        about = f"{request['method']} {request['target']} {request['body']}"
        if "region" in request["target"] and not request["target"].startswith("/admin/"):
            about = request["target"].rpartition("/")[0]
        self._history.pop(about, None)
        self._history[about] = request
        if len(self._history) > _REMEMBERED:
            del self._history[next(iter(self._history))]


def _call_handler(handle: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
    try:
        handle()
    except Exception as error:
        fail(error)


class _QuietExchange(Exchange):
    """The exchange of a request that another worker received and answers."""

    on_disconnect = on_body = on_body_end = on_writable = None
    peer = "another worker"
    started = False
    closed = False

    def __init__(self, head: RequestHead, body: bytes, params: tuple[str, ...], answered: Callable[[], None]) -> None:
        self.head, self.body, self.params = head, body, params
        self._answered = answered

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        if head.status >= 400:  # As in the worker that received the request.
            log.debug("%s was answered with status %d in this worker", self.head.path, head.status)
        self._answered()


class _QuietCall:
    """The gRPC call of a request that another worker received and answers."""

    over = False
    peer = "another worker"

    def __init__(self, head: RequestHead, answered: Callable[[], None]) -> None:
        self.head = head
        self._answered = answered

    def reply(self, message: object) -> None:
        self._answered()

    def fail(self, error: BaseException) -> None:
        log.debug("%s failed in this worker: %s", self.head.path, error)
        self._answered()


_LOAD = "model"
_LOAD_TIMEOUT_SECONDS = 3600.0
"""Large models take long to load."""


class LoadBroadcaster:
    """Loads and unloads models in all workers."""

    def __init__(self, channel: WorkerChannel, plane: DataPlane) -> None:
        self._channel = channel
        self._own = plane
        self._caught_up = asyncio.Event()

    def start(self) -> None:
        """Start handling load requests of other workers; they wait for `catch_up`."""
        self._channel.register_handler(_LOAD, self._handle)

    async def catch_up(self) -> None:
        """Repeat the load requests from before this worker started, after its own models are loaded."""
        for path in sorted(self._channel.folder.glob("*.load-request")):
            try:
                await self._apply(orjson.loads(path.read_bytes()))
            except HeadraceError as error:
                log.error("Could not repeat a load request of another worker: %s", error.message)
            except FileNotFoundError:
                continue
        self._caught_up.set()

    async def load(self, name: str, config_json: str | None, files: Mapping[str, bytes] | None) -> None:
        """Load a model in all workers."""
        encoded = {path: base64.b64encode(content).decode() for path, content in (files or {}).items()}
        await self._broadcast({"name": check_name(name), "load": True, "config": config_json, "files": encoded})

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a model in all workers."""
        await self._broadcast({"name": check_name(name), "load": False, "dependents": unload_dependents})

    async def _broadcast(self, load_request: dict[str, Any]) -> None:
        await self._caught_up.wait()
        # Not the model's name: with a suffix it may be too long for a file.
        path = self._channel.folder / sha256(load_request["name"].encode()).hexdigest()
        async with FileLock(path.with_suffix(".lock")).hold():
            await self._apply(load_request)
            # Before the other workers get the request: a worker that starts meanwhile reads this file.
            write_atomically(path.with_suffix(".load-request"), orjson.dumps(load_request), durable=False)
            answers = await self._channel.request_all(_LOAD, load_request, seconds=_LOAD_TIMEOUT_SECONDS)
        for index, answer in answers.items():
            if isinstance(answer, WorkerUnavailable):
                log.warning("Worker %d is unavailable; it repeats the load request when it starts", index)
            elif isinstance(answer, HeadraceError):
                raise with_message(answer, f"{answer.message} (in worker {index}; the model may serve in others)")

    async def _handle(self, load_request: Any) -> None:
        await self._caught_up.wait()
        await self._apply(load_request)

    async def _apply(self, load_request: dict[str, Any]) -> None:
        if load_request["load"]:
            files = {path: base64.b64decode(text) for path, text in load_request["files"].items()}
            await self._own.load(load_request["name"], load_request["config"], files or None)
        else:
            await self._own.unload(load_request["name"], unload_dependents=load_request["dependents"])
