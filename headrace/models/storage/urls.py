# SPDX-License-Identifier: Apache-2.0
"""The one parser of web URLs: what it makes is what is checked and what is fetched, so that no two readings can differ.

Called by `fetching`. Refuses every text on whose meaning parsers are known to disagree.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from headrace.core.errors import InvalidArgument
from headrace.models.storage.locations import WEB_SCHEMES, public_text

MOST_CHARACTERS = 8192
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
# What a resolver may take for a number, and so for an address: 2130706433, 0x7f.1, 0177.0.0.1.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_KEPT = "!#$%&'()*+,/:;=?@[]~"


@dataclass(frozen=True, slots=True)
class WebUrl:
    """A URL, taken apart."""

    scheme: str
    host: str
    """In lower case; an IPv6 address without brackets."""
    port: int
    target: str
    """Path and query, as they are sent."""

    @property
    def authority(self) -> str:
        """The host and, where it is not the usual one, the port: as in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.scheme == "https" else 80
        return host if self.port == usual else f"{host}:{self.port}"

    @property
    def text(self) -> str:
        """All of it, secrets too: to resolve a redirect against, never to show."""
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_web_url(text: str) -> WebUrl:
    """Take a URL apart. Raises InvalidArgument that says what to change."""
    if len(text) > MOST_CHARACTERS:
        raise InvalidArgument(f"a URL of {len(text)} characters is too long; {MOST_CHARACTERS} are the most")
    shown = public_text(text)
    if "\\" in text or any(ord(char) < 0x20 or ord(char) == 0x7F for char in text):
        raise InvalidArgument(f"{shown} has a backslash or a control character; write it percent-encoded")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise InvalidArgument(f"{shown} is not a URL: its host or port cannot be read") from None
    if parts.scheme not in WEB_SCHEMES:
        raise InvalidArgument(f"{shown} is not an http:// or https:// URL")
    if "@" in parts.netloc:
        raise InvalidArgument(f"{shown} has a user or password before the host; URLs with them are not fetched")
    if port == 0:
        raise InvalidArgument(f"{shown} has port 0, on which nothing answers")
    # A `%` (a zone of IPv6) or anything else that is not of a host is refused here, too.
    host = host.removesuffix(".")
    if not _is_host(host):
        raise InvalidArgument(f"the host of {shown} is not a name or an address (names beyond ASCII: as xn--...)")
    path = quote(parts.path or "/", safe=_KEPT)
    query = f"?{quote(parts.query, safe=_KEPT)}" if parts.query else ""
    return WebUrl(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), path + query)


def _is_host(host: str) -> bool:
    if ":" in host:
        try:
            return ipaddress.IPv6Address(host).scope_id is None
        except ValueError:
            return False
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return False
        return True
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels)
