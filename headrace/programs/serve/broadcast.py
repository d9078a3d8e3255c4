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
from headrace.programs.serve.worker_channel import Away, WorkerChannel

log = logging.getLogger("headrace.apps")

_REPEAT, _SO_FAR = "repeat", "repeated so far"
_PATIENCE_SECONDS = 5.0
_REMEMBERED = 4096
"""Requests kept for workers that start later; beyond this, the oldest are dropped."""

Deed = dict[str, Any]
"""A request, as JSON."""


class Broadcaster:
    """One worker's part in broadcasting control requests."""

    def __init__(self, siblings: WorkerChannel) -> None:
        self._siblings = siblings
        self._handlers: dict[str, Handler | UnaryHandler] = {}
        self._remembered_names: set[str] = set()
        self._so_far: dict[str, Deed] = {}

    def start(self) -> None:
        """Start handling requests that other workers broadcast."""
        self._siblings.answer(_REPEAT, self._repeat)
        self._siblings.answer(_SO_FAR, self._tell)

    async def catch_up(self) -> None:
        """Repeat the requests that were broadcast before this worker started."""
        answers = await self._siblings.ask_all(_SO_FAR, seconds=_PATIENCE_SECONDS)
        known = [answer for answer in answers.values() if isinstance(answer, list)]
        for request in max(known, key=len, default=[]):
            await self._repeat(request)

    def know(self, name: str, handler: Handler | UnaryHandler, *, remember: bool = True) -> None:
        """Register a handler for broadcast requests of this name; `remember` them for workers that start later."""
        self._handlers[name] = handler
        if remember:
            self._remembered_names.add(name)

    def alone(self) -> AbstractAsyncContextManager[None]:
        """Lock out other workers, so that simultaneous requests are applied in the same order everywhere."""
        return FileLock(self._siblings.folder / "repeating.lock").hold()

    async def everywhere(
        self, name: str, head: RequestHead, body: bytes, params: tuple[str, ...] = (), *, here: bool = False
    ) -> None:
        """Broadcast a request to all other workers, and to this one if asked; an absent worker gets it later."""
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
        await self._siblings.ask_all(_REPEAT, request, seconds=_PATIENCE_SECONDS)
        if here:
            await self._repeat({**request, "params": list(params)})

    async def _tell(self, _arguments: Any) -> list[Deed]:
        return list(self._so_far.values())

    async def _repeat(self, request: Deed) -> None:
        self._remember(request)
        handler = self._handlers[request["name"]]
        fields = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in request["fields"]]
        target = request["target"].encode("latin-1")
        head = RequestHead(request["method"].encode("latin-1"), target, fields, version=request["version"])
        body = base64.b64decode(request["body"])
        answered = asyncio.Event()
        if request["name"].startswith("/"):
            call = cast("GrpcCall", _QuietCall(head, answered.set))
            _guarded(lambda: cast("UnaryHandler", handler)(call, body), call.fail)
        else:
            exchange = _QuietExchange(head, body, tuple(request["params"]), answered.set)
            _guarded(lambda: cast("Handler", handler)(exchange), exchange.fail)
        await answered.wait()

    def _remember(self, request: Deed) -> None:
        if request["name"] not in self._remembered_names:
            return
        # Registering and unregistering a region concern the same thing: only the last request counts.
        about = f"{request['method']} {request['target']} {request['body']}"
        if "region" in request["target"] and not request["target"].startswith("/admin/"):
            about = request["target"].rpartition("/")[0]
        self._so_far.pop(about, None)
        self._so_far[about] = request
        if len(self._so_far) > _REMEMBERED:
            del self._so_far[next(iter(self._so_far))]


def _guarded(do: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
    try:
        do()
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
        if head.status >= 400:  # It has the same result as in the worker that received it.
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


_QUESTION = "model"
_MOST_SECONDS = 3600.0
"""Large models take long to load."""


class LoadEverywhere:
    """One worker's part in loading models everywhere."""

    def __init__(self, siblings: WorkerChannel, own: DataPlane) -> None:
        self._siblings = siblings
        self._own = own
        self._caught_up = asyncio.Event()

    def start(self) -> None:
        """Start handling load requests of other workers; `catch_up` comes first."""
        self._siblings.answer(_QUESTION, self._asked)

    async def catch_up(self) -> None:
        """Repeat the load requests from before this worker started, after its own first loading."""
        for path in sorted(self._siblings.folder.glob("*.wish")):
            try:
                await self._do(orjson.loads(path.read_bytes()))
            except HeadraceError as error:
                log.error("this worker cannot follow the others: %s", error.message)
            except FileNotFoundError:
                continue
        self._caught_up.set()

    async def load(self, name: str, config_json: str | None, files: Mapping[str, bytes] | None) -> None:
        """Load a model in all workers."""
        encoded = {each: base64.b64encode(content).decode() for each, content in (files or {}).items()}
        await self._everywhere({"name": check_name(name), "load": True, "config": config_json, "files": encoded})

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a model in all workers."""
        await self._everywhere({"name": check_name(name), "load": False, "dependents": unload_dependents})

    async def _everywhere(self, wish: dict[str, Any]) -> None:
        await self._caught_up.wait()
        # Not by its name, which with a suffix may be too long for a file.
        place = self._siblings.folder / sha256(wish["name"].encode()).hexdigest()
        async with FileLock(place.with_suffix(".lock")).hold():
            await self._do(wish)
            # Before the other workers are asked: one that starts meanwhile finds it here.
            write_atomically(place.with_suffix(".wish"), orjson.dumps(wish), durable=False)
            answers = await self._siblings.ask_all(_QUESTION, wish, seconds=_MOST_SECONDS)
        for index, answer in answers.items():
            if isinstance(answer, Away):
                log.warning("worker %d is away and will follow when it is back", index)
            elif isinstance(answer, HeadraceError):
                raise with_message(answer, f"{answer.message} (in worker {index}; the model may serve in others)")

    async def _asked(self, wish: Any) -> None:
        await self._caught_up.wait()
        await self._do(wish)

    async def _do(self, wish: dict[str, Any]) -> None:
        if wish["load"]:
            files = {each: base64.b64decode(text) for each, text in wish["files"].items()}
            await self._own.load(wish["name"], wish["config"], files or None)
        else:
            await self._own.unload(wish["name"], unload_dependents=wish["dependents"])
