# SPDX-License-Identifier: Apache-2.0
"""Responses that are computed in the background (`background: true`): stored at once, and updated until they are complete.

The client that created one is answered at once; it asks for the response, or cancels it, by later requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.api.openai.errors import log_unexpected
from headrace.api.openai.fields import Fields
from headrace.api.openai.output_parser import OutputParser
from headrace.api.openai.response_events import ResponseDocument
from headrace.core.errors import HeadraceError
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import RequestHead


class BackgroundExchange(Exchange):
    """Stands for the client of a background response, which does not wait: it gets nothing, and never disconnects."""

    on_body = on_body_end = on_writable = None
    peer = "a background response"
    started = False
    closed = False

    def __init__(self, head: RequestHead) -> None:
        self.head, self.body, self.params = head, b"", ()
        self.on_disconnect: Callable[[], None] | None = None

    def cancel(self) -> None:
        """Cancel the computation, as the disconnect of a client does."""
        if self.on_disconnect is not None:
            self.on_disconnect()


class BackgroundDocument(ResponseDocument):
    """The response so far; passes each of its states to `update`."""

    def __init__(
        self,
        exchange: BackgroundExchange,
        request: Fields,
        model: str,
        parser: Callable[[], OutputParser] | None,
        update: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(exchange, request, model, parser, lambda document, _deliver: update(document))
        self._update = update
        self.first_document = self._unfinished("queued")
        """What the client gets at once."""

    def fail(self, error: BaseException) -> None:
        """Store the failure."""
        if not isinstance(error, HeadraceError):
            log_unexpected(self._exchange, error, self.first_document["id"])
        self._update(self._failed(error))

    def _start(self) -> None:
        self._update(self._unfinished())
