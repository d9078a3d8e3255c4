# SPDX-License-Identifier: Apache-2.0
"""The client of the commands that inspect or control a running server."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import quote

from headrace.cli.common_options import SERVER_URL
from headrace.core.errors import FailedPrecondition, HeadraceError, Unavailable, Unimplemented, with_message
from headrace.net.http_client import error_text, parse_server_url, request

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


NOT_EXPLICIT = "explicit model load / unload is not allowed"
EXPLICIT_COMMAND = 'headrace serve MODELS --model-control-mode explicit --load-model "*"'


def explain_control_mode(error: HeadraceError) -> HeadraceError:
    """Return an error that says how to restart a server which does not load models on request; other errors unchanged."""
    if NOT_EXPLICIT not in error.message:
        return error
    reason = error.message.partition(": restart")[0]
    return with_message(error, f"{reason}: restart the server with '{EXPLICIT_COMMAND}'")


class ServerClient:
    """A client of one server."""

    def __init__(self, url: str = SERVER_URL) -> None:
        parts = parse_server_url(url if "://" in url else f"http://{url}")
        if parts.scheme != "http":
            raise Unimplemented(f"{url}: only http:// is supported; run this on the server's machine, without TLS")
        self.url = f"http://{parts.netloc}{parts.path.rstrip('/')}"

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        return self._request("GET", path, None, _SECONDS)

    def post(self, path: str, document: Any = None, *, seconds: float = _SECONDS) -> Any:
        """Send JSON and return the response's JSON, None for an empty response."""
        return self._request("POST", path, b"" if document is None else json.dumps(document).encode(), seconds)

    def _request(self, method: str, path: str, body: bytes | None, seconds: float) -> Any:
        try:
            response = request(method, self.url, path, body, credentials(), seconds=seconds)
        except TimeoutError:
            raise Unavailable(f"{self.url} did not answer within {seconds:g} s; check its log") from None
        except OSError as error:
            reason = error_text(error)
            raise Unavailable(
                f"no server answers at {self.url} ({reason}); start one with 'headrace serve MODELS', or set --url"
            ) from None
        return self._read(response.status, response.content, path)

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
