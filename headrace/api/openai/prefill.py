# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/headrace/prefill`: compute a prompt and keep its pages for a decoder. Registered by `http`; see `core.handing`.

The body is that of a chat or a completions request, as the client wrote it: so both servers make the same tokens of it. The
answer is `{"ticket": "...", "prompt_tokens": N}`; an empty ticket says that there is nothing to take. For routers of the
fleet: they show that they know its key, or ask from this machine.
"""

from __future__ import annotations

import ipaddress
import time

from headrace.api.openai.chat import Chat
from headrace.api.openai.completions import Completions
from headrace.api.openai.fields import Fields, read_document
from headrace.api.openai.tickets import TicketWriter
from headrace.core.errors import PermissionDenied
from headrace.core.handing import HEADER, HandingSettings, may_ask
from headrace.net.http.exchange import Exchange


class Prefill:
    """Over the handlers of whole requests."""

    def __init__(self, chat: Chat, completions: Completions, settings: HandingSettings) -> None:
        self._chat = chat
        self._completions = completions
        self._key = settings.key

    def handle(self, exchange: Exchange) -> None:
        """One prompt."""
        self._check(exchange)
        fields = Fields(read_document(exchange.body))
        exchange.body = b""
        begin = self._chat.begin if "messages" in fields.members else self._completions.begin
        begin(exchange, fields, TicketWriter(exchange))

    def _check(self, exchange: Exchange) -> None:
        if _is_this_machine(exchange.peer_address):
            return
        proof = exchange.head.get(HEADER) or b""
        if not self._key or not may_ask(self._key, proof, bytes(exchange.body), time.time()):
            raise PermissionDenied(
                "prompts are computed here for routers that know the key of this fleet: give the router --handing-key-file"
            )


def _is_this_machine(address: bytes) -> bool:
    try:
        found = ipaddress.ip_address(address.decode("latin-1").strip("[]"))
    except ValueError:
        return not address  # a UNIX socket
    return found.is_loopback
