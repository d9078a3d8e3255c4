# SPDX-License-Identifier: Apache-2.0
"""Where a server is: `http://host:8000/prefix`, `https://`, `grpc://host:8001`, `grpcs://`. Read by both clients."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.core.errors import InvalidArgument

_PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 8001}
_HEADRACE_PORT = 8000
_FORMS = "write http://host:8000, https://host, grpc://host:8001 or grpcs://host:8001"
_UNFIT = re.compile(r"[^\x21-\x7e]")


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address, taken apart."""

    scheme: str
    host: str
    port: int
    prefix: str
    """What stands before `/v2` behind a proxy; "" for nothing."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Take a URL apart; without a scheme it is HTTP, at port 8000."""
        if not isinstance(url, str) or _UNFIT.search(url):
            raise InvalidArgument(f"{str(url)[:200]!a} is no address of a server: {_FORMS}")
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise InvalidArgument(f"{url}: the port must be a number from 0 to 65535") from None
        if parts.scheme not in _PORTS:
            raise InvalidArgument(f"{url}: '{parts.scheme}' is not spoken here: {_FORMS}")
        if not parts.hostname:
            raise InvalidArgument(f"{url} names no host: {_FORMS}")
        if parts.username is not None or parts.query or parts.fragment:
            raise InvalidArgument(f"{url}: an address has no user, '?' or '#'; give a token with token=...")
        if parts.scheme.startswith("grpc") and parts.path.strip("/"):
            raise InvalidArgument(f"{url}: an address for gRPC has no path")
        usual = _PORTS[parts.scheme] if "://" in url else _HEADRACE_PORT
        given = usual if port is None else port
        return cls(parts.scheme, parts.hostname, given, parts.path.rstrip("/"))

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken."""
        return self.scheme in ("https", "grpcs")

    @property
    def is_grpc(self) -> bool:
        """Whether gRPC is spoken."""
        return self.scheme in ("grpc", "grpcs")

    @property
    def authority(self) -> str:
        """Host and port, as a Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        """As a person would write it."""
        return f"{self.scheme}://{self.authority}{self.prefix}"
