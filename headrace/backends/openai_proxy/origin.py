# SPDX-License-Identifier: Apache-2.0
"""Where an engine is: an URL, read once. Called by `settings` and `engine`; connects to nothing."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port, and what stands before every path."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    @property
    def shown(self) -> str:
        """For people and for the field `host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def context(self) -> ssl.SSLContext | None:
        """How an engine behind https proves who it is. Reads the system's certificates."""
        return ssl.create_default_context() if self.tls else None


def origin_of(url: str) -> Origin:
    """The parts of an URL; refuses what would be left out."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
        parts = urlsplit("")
    plain = url.isascii() and url.isprintable() and " " not in url
    if not plain or parts.scheme not in ("http", "https") or not host:
        raise InvalidArgument(f"parameter url is '{url[:128]}': write http://host:port or https://host:port")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidArgument(
            "parameter url has a user, a query or a fragment: write http://host:port, and give a key by api_key_env"
        )
    # People copy the address that clients of OpenAI take, which ends in /v1.
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    tls = parts.scheme == "https"
    return Origin(host, port or (443 if tls else 80), tls, prefix)
