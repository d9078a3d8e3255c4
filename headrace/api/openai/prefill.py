# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/headrace/prefill`: compute a prompt and keep its KV-cache pages for a decode server (`core.kv_transfer`).

The body is the client's chat or completions request, unchanged, so that both servers compute the same tokens. The
response is `{"ticket": "...", "prompt_tokens": N}`; `ticket` is the KV transfer token, empty if there are no pages to
transfer. Only routers of the fleet may call it: they prove that they know its key, or call from this machine.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from dataclasses import replace

import orjson

from headrace.api.openai.errors import fail
from headrace.api.openai.fields import Fields, parse_body
from headrace.core.errors import PermissionDenied
from headrace.core.generation import Generation, Sampling
from headrace.core.kv_transfer import MAX_TOKEN_CHARACTERS, TRANSFER_HEADER, KvTransferSettings, is_valid_prefill_proof
from headrace.core.requests import InferResponse
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON

_PROMPT_SAMPLING = Sampling(max_tokens=1, temperature=0.0)
_NO_TOKEN: dict[str, object] = {"ticket": "", "prompt_tokens": 0}


class Prefill:
    """Computes prompts with the handlers of chat and completions requests."""

    def __init__(self, chat: BeginPrompt, completion: BeginPrompt, settings: KvTransferSettings) -> None:
        self._chat = chat
        self._completion = completion
        self._key = settings.key

    def handle(self, exchange: Exchange) -> None:
        """Handle one request."""
        self._check(exchange)
        fields = parse_body(exchange)
        begin = self._chat if "messages" in fields.members else self._completion
        begin(exchange, fields, TransferTokenWriter(exchange))

    def _check(self, exchange: Exchange) -> None:
        if _is_this_machine(exchange.peer_address):
            return
        proof = exchange.head.get(TRANSFER_HEADER) or b""
        if not self._key or not is_valid_prefill_proof(self._key, proof, bytes(exchange.body), time.time()):
            raise PermissionDenied(
                "only routers that know the key of this fleet may prefill prompts: give the router --handing-key-file"
            )


def _is_this_machine(address: bytes) -> bool:
    try:
        parsed = ipaddress.ip_address(address.decode("latin-1").strip("[]"))
    except ValueError:
        return not address  # a UNIX socket
    return parsed.is_loopback


def with_transfer_token(exchange: Exchange, generation: Generation) -> Generation:
    """Add the transfer token of the request's header, if there is one. The model checks whether it is valid."""
    token = exchange.head.get(TRANSFER_HEADER)
    if token is None or len(token) > MAX_TOKEN_CHARACTERS:
        return generation
    return replace(generation, transfer_token=token.decode("latin-1"))


class TransferTokenWriter:
    """Writes the response to a prefill request."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._documents: list[dict[str, object]] = []

    def add(self, request: int, response: InferResponse) -> None:
        """Keep the transfer token; a backend without KV transfer sends none."""
        parameters = response.parameters
        self._documents.append({name: parameters.get(name, default) for name, default in _NO_TOKEN.items()})

    def end(self) -> None:
        """Respond. Pages of several prompts are not transferred: a request has one transfer token."""
        document = self._documents[0] if len(self._documents) == 1 else _NO_TOKEN
        self._exchange.respond(OK_JSON, orjson.dumps(document))

    def fail(self, error: BaseException) -> None:
        """Respond with an error."""
        fail(self._exchange, error)


def prompt_only(generation: Generation) -> Generation:
    """Reduce a request to its prompt, whose pages are kept."""
    return replace(generation, sampling=_PROMPT_SAMPLING, output_format=None, stream=False, prefill_only=True)


BeginPrompt = Callable[[Exchange, Fields, TransferTokenWriter], None]
"""`Chat.begin` or `Completions.begin`."""
