# SPDX-License-Identifier: Apache-2.0
"""Allowed names, URLs and request ids.

One regular expression for every name that may become a path, a label or an id. A name never starts with a dot or a dash and
has no separator, so it cannot leave a folder, be hidden, or be read as an option.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from difflib import get_close_matches
from urllib.parse import urlsplit

from headrace.core.errors import InvalidArgument

NAME_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}"
"""Model, job, workspace and service names: 1 to 255 letters, digits, `_`, `.`, `-`; first a letter, digit or `_`."""

_NAME = re.compile(NAME_PATTERN)
_VERSION = re.compile(r"0|[1-9][0-9]{0,17}")


def is_name(text: str) -> bool:
    """Return whether `text` may name a model, job, workspace or service."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def check_name(text: str, what: str = "model") -> str:
    """Return `text` if it is a name; otherwise raise an error that says what a name looks like."""
    if not is_name(text):
        shown = ascii(text[:64])
        raise InvalidArgument(
            f"{what} name {shown} is not allowed: use 1 to 255 letters, digits, '_', '.' or '-', "
            "starting with a letter, digit or '_', without '..'"
        )
    return text


def nearest(name: str, known: Iterable[str], closeness: float = 0.6) -> str:
    """Return the known name that a misspelt one most likely means, whatever their case; "" if none is close (0 to 1)."""
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(name[:64].lower(), by_lower, 1, closeness)
    return by_lower[close[0]] if close else ""


def parse_version(text: str) -> int:
    """Return the number of a version directory or of a version in a request; versions are 0, 1, 2, ..."""
    if _VERSION.fullmatch(text) is None:
        raise InvalidArgument(f"model version {text[:64]!a} is not allowed: use a whole number such as 1")
    return int(text)


def is_http_url(url: str) -> bool:
    """Return whether `url` is an http:// or https:// URL with a host and a valid port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


REQUEST_ID_FIELD = "x-request-id"
"""Header in which a client may send its own request id, and in which the server returns the id."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:\-]{1,128}")


def request_id(sent: bytes | None) -> str:
    """Return the client's id if it is safe to log; otherwise a new random one."""
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent.decode()
    return secrets.token_hex(8)
