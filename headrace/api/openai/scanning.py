# SPDX-License-Identifier: Apache-2.0
"""Where a JSON value ends in a text that is still coming. Used by `calls`."""

from __future__ import annotations

import re
from json import JSONDecodeError, JSONDecoder
from typing import Any

_MARKS = re.compile(r'["\\{}\[\]]')
_WHITE = " \t\r\n"


class JsonScanner:
    """Follows one object or list that begins at the text's beginning. Every character is looked at once."""

    def __init__(self) -> None:
        self._seen = 0
        self._depth = 0
        self._in_string = False

    def end_in(self, text: str) -> int:
        """Behind the value's last character; -1 while it is not there. `text` must be what it was, or longer."""
        at = self._seen
        while True:
            mark = _MARKS.search(text, at)
            if mark is None:
                self._seen = max(at, len(text))
                return -1
            at = mark.end()
            sign = mark.group()
            if self._in_string:
                if sign == "\\":
                    at += 1
                elif sign == '"':
                    self._in_string = False
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._seen = at
                    return at


def values_in(text: str) -> list[Any] | None:
    """The JSON values of a text that has nothing else; None if it has."""
    decoder = JSONDecoder()
    values = []
    rest = text.strip(_WHITE)
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (JSONDecodeError, RecursionError):
            return None
        values.append(value)
        rest = rest[end:].lstrip(_WHITE)
    return values
