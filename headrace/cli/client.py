# SPDX-License-Identifier: Apache-2.0
"""A small HTTP client for running servers, built on the standard library.

Used by the commands that inspect or control a server. It follows no redirects, uses no proxy, and limits the response
size.
"""

from __future__ import annotations

import http.client
import json
import os
from typing import Any
from urllib.parse import quote, urlsplit

from headrace.core.errors import FailedPrecondition, InvalidArgument, Unavailable, Unimplemented

DEFAULT_URL = "http://127.0.0.1:8000"
_MOST_BYTES = 64 * 1024 * 1024
_SECONDS = 30.0
LOAD_SECONDS = 3600.0
"""Large models take long to load."""


def credentials() -> dict[str, str]:
    """Return the header for a server that requires API keys; empty without `HEADRACE_API_KEY`."""
    key = os.environ.get("HEADRACE_API_KEY", "")
    return {"authorization": f"Bearer {key}"} if key else {}


class Refused(FailedPrecondition):
    """Raise when the server answers with an error; the text is the server's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """A client of one server."""

    def __init__(self, url: str = DEFAULT_URL) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http":
            raise Unimplemented(f"{url}: only http:// is supported; run this on the server's machine, without TLS")
        try:
            port = parts.port
        except ValueError:
            raise InvalidArgument(f"{url}: the port must be a number from 0 to 65535") from None
        if not parts.hostname:
            raise InvalidArgument(f"{url} is not a server URL: write {DEFAULT_URL}")
        self._host, self._port = parts.hostname, port or 80
        self._prefix = parts.path.rstrip("/")
        self.url = f"http://{parts.netloc}{self._prefix}"

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        return self._request("GET", path, None, _SECONDS)

    def post(self, path: str, document: Any = None, *, seconds: float = _SECONDS) -> Any:
        """Send JSON and return the response's JSON, None for an empty response."""
        return self._request("POST", path, b"" if document is None else json.dumps(document).encode(), seconds)

    def _request(self, method: str, path: str, body: bytes | None, seconds: float) -> Any:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        try:
            headers = credentials() | ({"content-type": "application/json"} if body else {})
            connection.request(method, self._prefix + path, body, headers)
            response = connection.getresponse()
            status, content = response.status, response.read(_MOST_BYTES + 1)
        except TimeoutError:
            raise Unavailable(f"{self.url} did not answer within {seconds:g} s; check its log") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise Unavailable(
                f"no server answers at {self.url} ({reason}); start one with 'headrace serve MODELS', or set --url"
            ) from None
        finally:
            connection.close()
        if len(content) > _MOST_BYTES:
            raise Unavailable(f"{self.url}{path} returned more than {_MOST_BYTES} bytes")
        return self._read(status, content, path)

    def _read(self, status: int, content: bytes, path: str) -> Any:
        try:
            document = json.loads(content) if content else None
        except (ValueError, RecursionError):
            raise Unavailable(f"{self.url}{path} did not return JSON: is it a Headrace server?") from None
        if status == 200:
            return document
        text = document.get("error") if isinstance(document, dict) else None
        raise Refused(status, str(text or f"{self.url}{path} returned status {status}"))


def model_path(name: str, version: str = "") -> str:
    """Return the URL path of a model or of one of its versions."""
    path = f"/v2/models/{quote(name, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path
