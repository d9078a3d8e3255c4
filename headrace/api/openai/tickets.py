# SPDX-License-Identifier: Apache-2.0
"""Tickets for pages in requests and answers: see `core.handing`. Used by `prefill`, `chat` and `completions`."""

from __future__ import annotations

from dataclasses import replace

import orjson

from headrace.api.openai.errors import fail
from headrace.core.generation import Generation, Sampling
from headrace.core.handing import HEADER, LONGEST_TICKET
from headrace.core.messages import InferResponse
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON

_PROMPT_ALONE = Sampling(max_tokens=1, temperature=0.0)
_NOTHING: dict[str, object] = {"ticket": "", "prompt_tokens": 0}


def with_ticket(exchange: Exchange, generation: Generation) -> Generation:
    """The same with the ticket that came with the request, if one did. It is the model's to look whether it is any good."""
    ticket = exchange.head.get(HEADER)
    if ticket is None or len(ticket) > LONGEST_TICKET:
        return generation
    return replace(generation, ticket=ticket.decode("latin-1"))


class TicketWriter:
    """Makes of the answer what a router gets. See `flows.Writer`."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._told: list[dict[str, object]] = []

    def add(self, request: int, response: InferResponse) -> None:
        """See `flows.Writer`."""
        told = response.parameters
        # A backend that hands nothing over says no ticket.
        self._told.append({name: told.get(name, nothing) for name, nothing in _NOTHING.items()})

    def end(self) -> None:
        """See `flows.Writer`. Pages of several prompts are not handed over: one request has one ticket."""
        told = self._told[0] if len(self._told) == 1 else _NOTHING
        self._exchange.respond(OK_JSON, orjson.dumps(told))

    def failed(self, error: BaseException) -> None:
        """See `flows.Writer`."""
        fail(self._exchange, error)


def prompt_alone(generation: Generation) -> Generation:
    """Of a request only its prompt, whose pages are to be kept."""
    return replace(generation, sampling=_PROMPT_ALONE, output_format=None, stream=False, hands=True)
