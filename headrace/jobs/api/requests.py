# SPDX-License-Identifier: Apache-2.0
"""Parse requests of the job API: JSON bodies, ids and query parameters.

Raises `InvalidArgument`, with TAO's texts where its clients know them. The Content-Type of a body is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from headrace.core.errors import InvalidArgument

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_ORGANISATION = re.compile(r"[a-zA-Z0-9_-]{1,255}")
_INTEGER = re.compile(r"[0-9]{1,9}")
_MAX_TEXT = 4096


def parse_body(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return the JSON object of a body; {} for an empty body."""
    if not len(body):
        return {}
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is not JSON (line {error.lineno}, column {error.colno})") from None
    if not isinstance(content, dict):
        raise InvalidArgument('the body must be a JSON object, such as {"parent_id": "..."}')
    return content


def parse_uuid(text: str, noun: str) -> str:
    """Return an id in lower case. `noun` is "Job", "Experiment" or "Workspace"."""
    if not _UUID.fullmatch(text):
        raise InvalidArgument(f"{noun} ID passed is not a valid UUID")
    return text.lower()


def parse_organisation(text: str) -> str:
    """Return a valid organisation name."""
    if not _ORGANISATION.fullmatch(text):
        raise InvalidArgument("an organisation name has 1 to 255 letters, digits, '_' and '-'")
    return text


def parse_number(query: Mapping[str, str], name: str) -> int | None:
    """Return an integer query parameter; None if it is missing."""
    text = query.get(name)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text):
        raise InvalidArgument(f"{name} must be an integer of 0 or more")
    return int(text)


class Fields:
    """The fields of a JSON object, by type; null counts as missing."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._given = fields

    def text(self, *names: str, max_chars: int = _MAX_TEXT) -> str | None:
        """Return a string, from the first of these names that is present."""
        for name in names:
            value = self._given.get(name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise InvalidArgument(f"{name} must be a string")
            if len(value) > max_chars or "\0" in value:
                raise InvalidArgument(f"{name} must have at most {max_chars} characters and no NUL")
            return value
        return None

    def uuid(self, noun: str, *names: str) -> str | None:
        """Return an id."""
        value = self.text(*names)
        return None if value is None else parse_uuid(value, noun)

    def flag(self, name: str) -> bool | None:
        """Return a boolean."""
        value = self._given.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidArgument(f"{name} must be true or false")
        return value

    def number(self, name: str, minimum: int, maximum: int) -> int | None:
        """Return an integer."""
        value = self._given.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise InvalidArgument(f"{name} must be an integer from {minimum} to {maximum}")
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        """Return an object."""
        value = self._given.get(name)
        if value is not None and not isinstance(value, dict):
            raise InvalidArgument(f"{name} must be a JSON object")
        return value

    def rest(self, *taken: str) -> dict[str, Any]:
        """Return all fields except these."""
        return {name: value for name, value in self._given.items() if name not in taken}
