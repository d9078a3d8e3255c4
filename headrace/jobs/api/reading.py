# SPDX-License-Identifier: Apache-2.0
"""What a client sent, checked: bodies, whatever their Content-Type; ids; parts of a query.

Used by every handler of this room. Raises `InvalidArgument` with the texts that TAO's clients know where there are some.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

import orjson

from headrace.core.errors import InvalidArgument

_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_ORGANISATION = re.compile(r"[a-zA-Z0-9_-]{1,255}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_MOST_TEXT = 4096
_MOST_FIELDS = 64


def document(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON object of a body; an empty body is an empty one."""
    if not len(body):
        return {}
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is no JSON (line {error.lineno}, column {error.colno})") from None
    if not isinstance(found, dict):
        raise InvalidArgument('the body must be a JSON object, such as {"parent_id": "..."}')
    return found


def uuid_of(text: str, what: str) -> str:
    """An id, in lower case. `what` is "Job", "Experiment" or "Workspace"."""
    if not _UUID.fullmatch(text):
        raise InvalidArgument(f"{what} ID passed is not a valid UUID")
    return text.lower()


def organisation_of(text: str) -> str:
    """The name of an organisation."""
    if not _ORGANISATION.fullmatch(text):
        raise InvalidArgument("the organisation's name has 1 to 255 letters, digits, '_' and '-'")
    return text


def query_of(query: bytes) -> Mapping[str, str]:
    """A query by its names; the last of each counts."""
    if not query:
        return {}
    try:
        return dict(parse_qsl(query.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS))
    except ValueError:
        raise InvalidArgument(f"the query must be NAME=VALUE in UTF-8, at most {_MOST_FIELDS} of them") from None


def number_of(query: Mapping[str, str], name: str) -> int | None:
    """A whole number of a query; None where it is not given."""
    text = query.get(name)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        raise InvalidArgument(f"{name} must be a whole number from 0 on")
    return int(text)


class Fields:
    """The fields of a JSON object, by their types. null is the same as nothing."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def text(self, *names: str, most: int = _MOST_TEXT) -> str | None:
        """A text, under the first of these names that is given."""
        for name in names:
            found = self._given.get(name)
            if found is None:
                continue
            if not isinstance(found, str):
                raise InvalidArgument(f"{name} must be a text")
            if len(found) > most or "\0" in found:
                raise InvalidArgument(f"{name} must have at most {most} characters, and none that is NUL")
            return found
        return None

    def uuid(self, what: str, *names: str) -> str | None:
        """An id."""
        found = self.text(*names)
        return None if found is None else uuid_of(found, what)

    def flag(self, name: str) -> bool | None:
        """True or false."""
        found = self._given.get(name)
        if found is not None and not isinstance(found, bool):
            raise InvalidArgument(f"{name} must be true or false")
        return found

    def number(self, name: str, low: int, high: int) -> int | None:
        """A whole number."""
        found = self._given.get(name)
        if found is None:
            return None
        if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
            raise InvalidArgument(f"{name} must be a whole number from {low} to {high}")
        return found

    def object(self, name: str) -> dict[str, Any] | None:
        """An object."""
        found = self._given.get(name)
        if found is not None and not isinstance(found, dict):
            raise InvalidArgument(f"{name} must be a JSON object")
        return found

    def rest(self, *taken: str) -> dict[str, Any]:
        """All but these."""
        return {name: value for name, value in self._given.items() if name not in taken}
