# SPDX-License-Identifier: Apache-2.0
"""Read the members of a request with their types and limits; an error names the member.

A member that is null counts as missing, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from headrace.api.openai.errors import BadRequest
from headrace.net.http.exchange import Exchange

_MAX_DEPTH = 96
"""Nested lists and objects in a request: more than any schema has, less than what orjson can write."""


def parse_body(exchange: Exchange) -> Fields:
    """Parse the body of a request as a JSON object, and release its memory."""
    try:
        document = orjson.loads(exchange.body)
    except orjson.JSONDecodeError as error:
        raise BadRequest("", f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadRequest("", "the body must be a JSON object")
    check_depth("", document)
    exchange.body = b""
    return Fields(document)


def check_depth(param: str, value: Any) -> None:
    """Raise if a value is nested too deeply."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            members = container.values() if isinstance(container, dict) else container
            inner += [member for member in members if isinstance(member, dict | list)]
        if not inner:
            return
        level = inner
    raise BadRequest(param, f"lists and objects are nested more than {_MAX_DEPTH} deep")


class Fields:
    """An object of a request, and its path in the request."""

    __slots__ = ("_path", "members")

    def __init__(self, members: Mapping[str, Any], at: str = "") -> None:
        self.members = members
        self._path = f"{at}." if at else ""

    def param(self, name: str) -> str:
        """Return the path of a member, for errors."""
        return self._path + name

    def error(self, name: str, message: str) -> BadRequest:
        """Return an error about a member."""
        return BadRequest(self.param(name), message)

    def get(self, name: str) -> Any:
        """Return a member unchecked; None if it is missing."""
        return self.members.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        """Return an integer within limits."""
        value = self.members.get(name)
        if value is None:
            return default
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"must be an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float, *, above: bool = False) -> float:
        """Return a number within limits; with `above`, it must be greater than `low`."""
        value = self.members.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high or (above and value == low):
            least = f"above {low:g}" if above else f"from {low:g}"
            raise self.error(name, f"must be a number {least} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.members.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str, most: int, default: str | None = None) -> str | None:
        """Return a string of at most `most` characters."""
        value = self.members.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > most:
            raise self.error(name, f"must be a string of at most {most} characters")
        return value

    def object(self, name: str) -> Mapping[str, Any] | None:
        """Return an object."""
        value = self.members.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return value

    def list(self, name: str, most: int) -> list[Any] | None:
        """Return a list of at most `most` items."""
        value = self.members.get(name)
        if value is not None and (not isinstance(value, list) or len(value) > most):
            raise self.error(name, f"must be a list of at most {most} items")
        return value

    def reject(self, reasons: Mapping[str, str]) -> None:
        """Raise for members that this server does not support and that would change the response."""
        for name, reason in reasons.items():
            if self.members.get(name):
                raise BadRequest(self.param(name), reason, "unsupported_parameter")
