# SPDX-License-Identifier: Apache-2.0
"""The members of a request, read one by one: of the right type, within their limits, or refused by name.

Used by all that read requests in this room. A member that is null counts as left out, as it does for OpenAI.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from headrace.api.openai.errors import Refused
from headrace.net.http.exchange import Buffer

_DEEPEST = 96
"""Nested lists and objects in a request: more than any schema has, less than what writing it again would stumble over."""


def read_document(body: Buffer) -> dict[str, Any]:
    """The body as a JSON object."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused("", f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise Refused("", "the body must be a JSON object")
    check_depth("", document)
    return document


def check_depth(param: str, value: Any) -> None:
    """Refuse what is nested too deeply."""
    level = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for each in level:
            members = each.values() if isinstance(each, dict) else each
            inner += [member for member in members if isinstance(member, dict | list)]
        if not inner:
            return
        level = inner
    raise Refused(param, f"lists and objects are nested more than {_DEEPEST} deep")


class Fields:
    """An object of a request, and where in the request it is."""

    __slots__ = ("_at", "members")

    def __init__(self, members: Mapping[str, Any], at: str = "") -> None:
        self.members = members
        self._at = f"{at}." if at else ""

    def param(self, name: str) -> str:
        """What a member is called in errors."""
        return self._at + name

    def refused(self, name: str, message: str) -> Refused:
        """An error about a member."""
        return Refused(self.param(name), message)

    def get(self, name: str) -> Any:
        """The member as it is; None if it was left out."""
        return self.members.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        """A whole number within limits."""
        value = self.members.get(name)
        if value is None:
            return default
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.refused(name, f"must be a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float, *, above: bool = False) -> float:
        """A number within limits; `above`: greater than the lower one."""
        value = self.members.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high or (above and value == low):
            least = f"above {low:g}" if above else f"from {low:g}"
            raise self.refused(name, f"must be a number {least} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.members.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.refused(name, "must be true or false")
        return value

    def text(self, name: str, most: int, default: str | None = None) -> str | None:
        """A string of at most so many characters."""
        value = self.members.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > most:
            raise self.refused(name, f"must be a string of at most {most} characters")
        return value

    def object(self, name: str) -> Mapping[str, Any] | None:
        """An object."""
        value = self.members.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refused(name, "must be an object")
        return value

    def list(self, name: str, most: int) -> list[Any] | None:
        """A list of at most so many items."""
        value = self.members.get(name)
        if value is not None and (not isinstance(value, list) or len(value) > most):
            raise self.refused(name, f"must be a list of at most {most} items")
        return value

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuse members that this server does not do and that change what an answer means."""
        for name, reason in reasons.items():
            if self.members.get(name):
                raise Refused(self.param(name), reason, "unsupported_parameter")
