# SPDX-License-Identifier: Apache-2.0
"""Which routes a server has, read from its table. The only place that knows how that table is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.api.openapi.describing import PLACEHOLDER
from headrace.wire.http.routes import Route, Routes

_SEGMENT = "([^/]+)"
_ESCAPED = re.compile(r"\\(.)")


def registered(routes: Routes) -> list[tuple[str, str]]:
    """Every method and path, in the order of paths; placeholders are `{}`, since the table forgets their names.

    HEAD is left out where GET answers it; mounted prefixes and `OPTIONS *` are no routes of their own.
    """
    found = []
    for path, methods in _paths(routes):
        if not path.startswith("/"):
            continue
        for method, route in methods.items():
            if method != b"HEAD" or methods.get(b"GET") is not route:
                found.append((method.decode(), path))
    return sorted(found, key=lambda each: (each[1], each[0]))


def named(path: str, names: list[str]) -> str:
    """The path with names for its placeholders; those that run out are `p1`, `p2`, ..."""
    given = iter(names)
    number = 0

    def name(_: re.Match[str]) -> str:
        nonlocal number
        number += 1
        return f"{{{next(given, f'p{number}')}}}"

    return PLACEHOLDER.sub(name, path)


def _paths(routes: Routes) -> Iterator[tuple[str, dict[bytes, Route]]]:
    for path, methods in routes._exact.items():
        yield path.decode(), methods
    for pattern, methods in routes._patterns:
        yield _ESCAPED.sub(r"\1", pattern.pattern.decode().replace(_SEGMENT, "{}")), methods
