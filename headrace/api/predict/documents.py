# SPDX-License-Identifier: Apache-2.0
"""The JSON of a request as a mapping of its fields. Called by the handlers of HTTP and WebSocket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from headrace.api.predict.checks import Checker, not_finite
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Buffer

_HELP = 'send {"inputs": [...]} or {"batch": [[...], ...]}'
_SPECIAL = (b"NaN", b"Infinity")


def read_fields(body: Buffer | str, checker: Checker) -> Mapping[str, Any]:
    """The fields of a JSON object. It holds no NaN and no infinity, unless the settings let them in."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        fields = _leniently(body, error, checker)
    if type(fields) is not dict:
        raise InvalidArgument(f"the request must be a JSON object: {_HELP}")
    return fields


def _leniently(body: Buffer | str, error: orjson.JSONDecodeError, checker: Checker) -> Any:
    """What orjson refused: it may be only because of a number that is none, which Python's own json writes and reads."""
    content = body.encode(errors="replace") if isinstance(body, str) else bytes(body)
    if not content.strip():
        raise InvalidArgument(f"the request is empty: {_HELP}")
    if any(word in content for word in _SPECIAL) or "infinity" in str(error):
        try:
            fields = json.loads(content)
            orjson.dumps(fields)  # else there is text in it that is none, or a number that nobody can write
        except (ValueError, TypeError, RecursionError):
            pass
        else:
            if checker.finite:
                raise not_finite()
            return fields
    raise InvalidArgument(f"the request is not JSON ({error}): {_HELP}") from None
