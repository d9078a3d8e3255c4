# SPDX-License-Identifier: Apache-2.0
"""v2 over HTTP: the repository's index, and loading and unloading of models.

Registered by `http`. Loading takes as long as it takes, so these handlers start a coroutine each; the exchange is
answered when it ends. A client that goes away meanwhile does not stop it: half a load helps nobody.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Coroutine, Mapping
from typing import Any

from headrace.api.v2.documents import answer_json, read_document
from headrace.api.v2.shared import V2Shared
from headrace.core.errors import InvalidArgument, Unavailable
from headrace.core.names import check_name
from headrace.engine.repository.control import IndexEntry
from headrace.net.http.exchange import Buffer, Exchange
from headrace.net.http.heads import OK_EMPTY
from headrace.net.http.routes import Routes

_FILE = "file:"


class V2Repository:
    """Handlers over one data plane."""

    def __init__(self, shared: V2Shared) -> None:
        self._plane = shared.plane
        self._gate = shared.http_gate
        # A task nobody refers to may be collected while it runs.
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        handlers = {"index": self.index, "models/{model}/load": self.load, "models/{model}/unload": self.unload}
        for path, handler in handlers.items():
            routes.add("POST", f"/v2/repository/{path}", self._gate.http("model-repository", handler))

    def index(self, exchange: Exchange) -> None:
        """Every model of the repository and where its versions stand."""
        ready_only = _flag(read_document(exchange.body), "ready")

        async def work() -> None:
            answer_json(exchange, [_entry(each) for each in await self._plane.index(ready_only=ready_only)])

        self._start(exchange, work())

    def load(self, exchange: Exchange) -> None:
        """Load a model, or load it anew."""
        name = check_name(exchange.params[0])
        body, exchange.body = exchange.body, b""

        async def work() -> None:
            # Decoding the files of a large model would hold up the loop.
            config, files = await asyncio.to_thread(_load_parameters, body)
            await self._plane.load(name, config, files)
            exchange.respond(OK_EMPTY)

        self._start(exchange, work())

    def unload(self, exchange: Exchange) -> None:
        """Stop serving a model."""
        name = check_name(exchange.params[0])
        dependents = _flag(_parameters(exchange.body), "unload_dependents")

        async def work() -> None:
            await self._plane.unload(name, unload_dependents=dependents)
            exchange.respond(OK_EMPTY)

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
    """Like Triton, without the members that have nothing to say."""
    shown = {
        "name": entry.name,
        "version": entry.version,
        "state": entry.state.value if entry.state is not None else "",
        "reason": entry.reason,
    }
    return {key: value for key, value in shown.items() if value}


def _parameters(body: Buffer) -> dict[str, Any]:
    parameters = read_document(body).get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidArgument("'parameters' must be a JSON object")
    return parameters


def _flag(document: dict[str, Any], name: str) -> bool:
    value = document.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"'{name}' must be true or false")
    return value


def _load_parameters(body: Buffer) -> tuple[str | None, dict[str, bytes]]:
    return load_parameters(_parameters(body))


def load_parameters(given: Mapping[str, Any]) -> tuple[str | None, dict[str, bytes]]:
    """The configuration and the files that a request to load gives, if any. Files in base64, or as bytes."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for name, value in given.items():
        if name != "config" and not name.startswith(_FILE):
            raise InvalidArgument(
                f"parameter {name[:64]!a} is not known: a request to load may give 'config' and 'file:<version>/<name>'"
            )
        if isinstance(value, bytes) and name != "config":
            files[name] = value
            continue
        if not isinstance(value, str):
            raise InvalidArgument(f"parameter {name[:64]!a} must be a string")
        if name == "config":
            config = value
        else:
            files[name] = _decoded(name, value)
    return config, files


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"parameter {name[:64]!a} must be the file's content in base64") from None
