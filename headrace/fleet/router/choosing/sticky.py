# SPDX-License-Identifier: Apache-2.0
"""What a session is known by: a cookie, a header, or a key of the body. Asked by `chooser`; the ring does the rest."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.fleet.router.choosing.request import Request
    from headrace.fleet.router.choosing.settings import StickySettings
    from headrace.net.http.heads import RequestHead

_LONGEST_KEY = 4096


class Sessions:
    """See the module."""

    def __init__(self, settings: StickySettings) -> None:
        self._cookie = settings.cookie.encode()
        self._header = settings.header.lower().encode()
        self._path = tuple(settings.body.split(".")) if settings.body else ()

    def key(self, request: Request) -> bytes:
        """What the session is known by; b"" where there is none."""
        if self._header:
            found = request.head.by_name.get(self._header, b"")
        elif self._cookie:
            found = self._from_cookie(request.head)
        else:
            found = self._from_body(request)
        return found[:_LONGEST_KEY]

    def cookie_for(self, request: Request) -> tuple[bytes, bytes]:
        """A new session's key, and the line of the response that tells its client; b"" twice where none is due."""
        if not self._cookie or self._from_cookie(request.head):
            return b"", b""
        key = secrets.token_hex(12).encode()
        secure = b"; Secure" if request.head.scheme == b"https" else b""
        return key, b"set-cookie: %b=%b; Path=/; HttpOnly; SameSite=Lax%b\r\n" % (self._cookie, key, secure)

    def _from_cookie(self, head: RequestHead) -> bytes:
        if b"cookie" not in head.by_name:
            return b""
        for name, value in head.fields:
            # HTTP/2 may have one field for each cookie.
            if name == b"cookie":
                for each in value.split(b";"):
                    cookie, _, said = each.strip().partition(b"=")
                    if cookie == self._cookie:
                        return said
        return b""

    def _from_body(self, request: Request) -> bytes:
        found = request.document
        for name in self._path:
            found = found.get(name) if isinstance(found, dict) else None
        return str(found).encode(errors="surrogatepass") if isinstance(found, str | int) else b""
