# SPDX-License-Identifier: Apache-2.0
"""v2 over HTTP: regions of shared memory, registered, listed and forgotten. Registered by `http`."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from headrace.api.v2.documents import answer_json, read_document
from headrace.api.v2.shared import V2Shared
from headrace.core.errors import InvalidArgument
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_EMPTY
from headrace.net.http.routes import Routes

_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"


class V2SharedMemory:
    """Handlers over the table of regions."""

    def __init__(self, shared: V2Shared) -> None:
        self._memory = shared.memory
        self._gate = shared.http_gate

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        handlers = (
            (_SYSTEM, self.system_status, self.unregister_system, self.register_system),
            (_CUDA, self.cuda_status, self.unregister_cuda, self.register_cuda),
        )
        for path, status, unregister, register in handlers:
            for place in (path, f"{path}/region/{{region}}"):
                routes.add("GET", f"{place}/status", self._gate.http("shared-memory", status))
                routes.add("POST", f"{place}/unregister", self._gate.http("shared-memory", unregister))
            routes.add("POST", f"{path}/region/{{region}}/register", self._gate.http("shared-memory", register))

    def system_status(self, exchange: Exchange) -> None:
        """One region, or all."""
        regions = self._memory.system_regions(_region(exchange))
        shown = [
            {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size} for each in regions
        ]
        answer_json(exchange, shown)

    def cuda_status(self, exchange: Exchange) -> None:
        """One region, or all."""
        regions = self._memory.cuda_regions(_region(exchange))
        shown = [{"name": each.name, "device_id": each.device_id, "byte_size": each.byte_size} for each in regions]
        answer_json(exchange, shown)

    def register_system(self, exchange: Exchange) -> None:
        """Take a region that the client made."""
        document = read_document(exchange.body)
        key = document.get("key")
        if not isinstance(key, str):
            raise InvalidArgument("'key' must be a string: the name that was given to shm_open")
        offset, size = _whole(document, "offset", 0), _whole(document, "byte_size")
        self._memory.register_system(_region(exchange), key, offset, size)
        exchange.respond(OK_EMPTY)

    def register_cuda(self, exchange: Exchange) -> None:
        """The same for a GPU's memory."""
        document = read_document(exchange.body)
        handle = document.get("raw_handle")
        text = handle.get("b64") if isinstance(handle, dict) else None
        if not isinstance(text, str):
            raise InvalidArgument('\'raw_handle\' must be an object with the handle in base64: {"b64": "..."}')
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidArgument("the 'b64' of 'raw_handle' is not base64") from None
        device, size = _whole(document, "device_id"), _whole(document, "byte_size")
        self._memory.register_cuda(_region(exchange), raw, device, size)
        exchange.respond(OK_EMPTY)

    def unregister_system(self, exchange: Exchange) -> None:
        """Forget a region, or all."""
        self._memory.unregister_system(_region(exchange))
        exchange.respond(OK_EMPTY)

    def unregister_cuda(self, exchange: Exchange) -> None:
        """Forget a region, or all."""
        self._memory.unregister_cuda(_region(exchange))
        exchange.respond(OK_EMPTY)


def _region(exchange: Exchange) -> str:
    return exchange.params[0] if exchange.params else ""


def _whole(document: dict[str, Any], name: str, default: int | None = None) -> int:
    value = document.get(name, default)
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"'{name}' must be a whole number of 0 or more")
    return value
