# SPDX-License-Identifier: Apache-2.0
"""The page at `/docs`: one answer with its style and its script inside, which reads `/openapi.json` and shows it.

Called by `service`. The parts are files in `assets`; they are put together once, when a server is made. The page may run
and wear nothing but what is in it (by hash), and talk to nobody but the server it came from.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from headrace.net.http.heads import CONTENT_TYPE, ResponseHead

_STYLE = "/*STYLE*/"
_SCRIPT = "/*SCRIPT*/"


def load_page() -> tuple[ResponseHead, bytes]:
    """The head and the body of the answer."""
    assets = files("headrace.api.openapi").joinpath("assets")
    style, script, frame = (
        assets.joinpath(name).read_text(encoding="utf-8") for name in ("docs.css", "docs.js", "docs.html")
    )
    page = frame.replace(_STYLE, style).replace(_SCRIPT, script)
    return ResponseHead(200, _fields(style, script)), page.encode()


def _fields(style: str, script: str) -> list[tuple[bytes, bytes]]:
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return [
        (CONTENT_TYPE, b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cache-control", b"no-cache"),
    ]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
