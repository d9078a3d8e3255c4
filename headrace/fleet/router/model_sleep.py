# SPDX-License-Identifier: Apache-2.0
"""Scale to zero in a warm process: put the models of an idle Headrace server to sleep, instead of stopping its replica.

`activation` calls it for services of the local fleet that ask for it. The replica stays ready: the server keeps a request to
a sleeping model, and wakes it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any
from urllib.parse import quote

from headrace.core.errors import InvalidArgument
from headrace.net.http_client import request

log = logging.getLogger("headrace.router")

_INDEX_SECONDS = 10.0
_SLEEP_SECONDS = 180.0
"""A server waits up to two minutes for the requests in flight."""


async def put_models_to_sleep(url: str, level: int) -> list[str]:
    """Put all models of a server to sleep that support it; return their names, [] for another kind of server."""
    return await asyncio.to_thread(_put_to_sleep, url, level)


def _put_to_sleep(url: str, level: int) -> list[str]:
    index = _post(url, "/v2/repository/index", {"ready": True}, _INDEX_SECONDS)
    entries = index if isinstance(index, list) else []
    names = {entry["name"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("name"), str)}
    path = "/v1/models/{}/sleep"
    return [
        name
        for name in sorted(names)
        if _post(url, path.format(quote(name, safe="")), {"level": level}, _SLEEP_SECONDS) is not None
    ]


def _post(url: str, path: str, document: dict[str, Any], seconds: float) -> Any | None:
    """Return the JSON of a response; None for an error, which is logged."""
    try:
        response = request("POST", url, path, json.dumps(document).encode(), seconds=seconds)
        if response.status == 200:
            return json.loads(response.content)
        log.info("%s%s answered %d: %s", url, path, response.status, response.content[:200].decode(errors="replace"))
    except (OSError, InvalidArgument, ValueError) as error:
        log.warning("%s%s failed: %s", url, path, error)
    return None
