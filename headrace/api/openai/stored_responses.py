# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses/{id}`: get, delete and cancel stored responses, and list their input items.

A response belongs to the API key that created it; for any other key it does not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import orjson

from headrace.api.openai.errors import BadRequest, OpenAiHandler, fail
from headrace.api.openai.response_store import Document, ResponseStore, StoredResponse
from headrace.core.errors import NotFound
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON, parse_query
from headrace.net.http.routes import Routes

PATH = "/v1/responses/{id}"
_PAGE, _MOST_ON_A_PAGE = 20, 100
_ORDERS = ("asc", "desc")


class StoredResponses:
    """Handlers over one store. `cancel_running` stops a background response, if this process computes it."""

    def __init__(self, store: ResponseStore | None, cancel_running: Callable[[str], None]) -> None:
        self._store = store
        self._cancel_running = cancel_running
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        routes.add("GET", PATH, OpenAiHandler(self.show), scope="infer")
        routes.add("GET", f"{PATH}/input_items", OpenAiHandler(self.list_input), scope="infer")
        routes.add("DELETE", PATH, OpenAiHandler(self.delete), scope="infer")
        # Another worker may compute the response.
        routes.add("POST", f"{PATH}/cancel", OpenAiHandler(self.cancel), scope="infer", workers="all-running")

    def show(self, exchange: Exchange) -> None:
        """Answer with a response as it is now."""
        if parse_query(exchange.head.query).get("stream", "").lower() == "true":
            raise BadRequest(
                "stream",
                "the events of a stored response are not kept: GET it without 'stream', again until its status is final",
                "unsupported_parameter",
            )
        self._spawn(exchange, self._show(exchange))

    def list_input(self, exchange: Exchange) -> None:
        """Answer with a page of the input items of a response's request."""
        query = parse_query(exchange.head.query)
        order, after, limit = query.get("order", "desc"), query.get("after", ""), query.get("limit", str(_PAGE))
        if order not in _ORDERS:
            raise BadRequest("order", "must be 'asc' or 'desc'")
        if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_ON_A_PAGE:
            raise BadRequest("limit", f"must be an integer from 1 to {_MOST_ON_A_PAGE}")
        self._spawn(exchange, self._list_input(exchange, order, after, int(limit)))

    def delete(self, exchange: Exchange) -> None:
        """Delete a response. Its computation stops, in another worker at its next change."""
        self._spawn(exchange, self._delete(exchange))

    def cancel(self, exchange: Exchange) -> None:
        """Cancel a background response. One that is finished stays as it is."""
        self._spawn(exchange, self._cancel(exchange))

    async def _show(self, exchange: Exchange) -> None:
        _respond(exchange, (await self._found(exchange)).document)

    async def _list_input(self, exchange: Exchange, order: str, after: str, limit: int) -> None:
        items = (await self._found(exchange)).input
        if order == "desc":
            items = items[::-1]
        if after:
            places = [index for index, item in enumerate(items) if item["id"] == after]
            if not places:
                raise BadRequest("after", f"no input item of this response has the id {after[:128]!a}")
            items = items[places[0] + 1 :]
        page = items[:limit]
        ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        _respond(exchange, {"object": "list", "data": page, **ids, "has_more": len(items) > limit})

    async def _delete(self, exchange: Exchange) -> None:
        response = await self._found(exchange)
        name = response.document["id"]
        self._cancel_running(name)
        if self._store is not None:
            await self._store.remove(exchange.caller, name)
        _respond(exchange, {"id": name, "object": "response", "deleted": True})

    async def _cancel(self, exchange: Exchange) -> None:
        response = await self._found(exchange)
        document = response.document
        if not document["background"]:
            raise BadRequest(
                "", "only a response with 'background': true can be cancelled: close its connection instead"
            )
        if response.is_unfinished and self._store is not None:
            self._cancel_running(document["id"])
            await self._store.update({**document, "status": "cancelled"})
            document = (await self._found(exchange)).document
        _respond(exchange, document)

    async def _found(self, exchange: Exchange) -> StoredResponse:
        name = exchange.params[0]
        response = await self._store.find(exchange.caller, name) if self._store is not None else None
        if response is None:
            reason = (
                "it was deleted, was not stored, or is too old" if self._store is not None else "this server keeps none"
            )
            raise NotFound(f"Response with id {name[:128]!a} not found: {reason}")
        return response

    def _spawn(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                fail(exchange, error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _respond(exchange: Exchange, document: Document) -> None:
    exchange.respond(OK_JSON, orjson.dumps(document))
