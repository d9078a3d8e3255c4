# SPDX-License-Identifier: Apache-2.0
"""The access log: one line per answered request, through the logger `headrace.access`.

`log_access` is handed to `wire.site.Site` as its `access_log` when a setting asks for one. Must not know the wire: what
it needs of a request is spelled out here. The query is left out, because people put keys and tokens there.
"""

from __future__ import annotations

import logging
from typing import Protocol

_log = logging.getLogger("headrace.access")


class Head(Protocol):
    """What the access log reads of a request's head."""

    @property
    def method(self) -> bytes:
        """The method, as sent."""

    @property
    def path(self) -> bytes:
        """The path, as sent, without the query."""

    @property
    def version(self) -> str:
        """The HTTP version: "1.1" or "2"."""


def log_access(peer: str, head: Head, status: int, key_name: str = "") -> None:
    """Write one line for a request that was answered; the log format escapes what the client chose.

    `key_name` is the name of the API key it came with, never the key.
    """
    if not _log.isEnabledFor(logging.INFO):
        return
    details = {
        "peer": peer,
        "method": _text(head.method),
        "path": _text(head.path),
        "protocol": f"HTTP/{head.version}",
        "status": status,
    }
    if key_name:
        details["key_name"] = key_name
    _log.info("answered", extra=details)


def _text(sent: bytes) -> str:
    return sent.decode("utf-8", "backslashreplace")
