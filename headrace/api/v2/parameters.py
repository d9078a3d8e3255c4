# SPDX-License-Identifier: Apache-2.0
"""Request parameters: which a client may give, and those that are made of its headers.

Called by both codecs where a request has parameters, and by the handlers where headers are passed on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.messages import Parameters, ParameterValue
from headrace.net.http.heads import RequestHead

EMPTY_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"

_KINDS = (str, int, float, bool)
_TYPES: dict[str, tuple[type, ...]] = {
    "sequence_id": (int, str),
    "sequence_start": (bool,),
    "sequence_end": (bool,),
    "priority": (int,),
    "timeout": (int,),
    "binary_data_output": (bool,),
    EMPTY_FINAL: (bool,),
}
"""Parameters with a meaning of their own. A header of such a name is none of them."""
_FIELDS = {int: "int64_param", str: "string_param", bool: "bool_param"}


def checked(parameters: Mapping[str, object]) -> Parameters:
    """The parameters of a request as a client gave them; raises for names that are the server's, and for other values."""
    check(parameters)
    for name, value in parameters.items():
        if type(value) not in _KINDS:
            raise InvalidArgument(
                f"parameter {name[:64]!a} must be a string, a number, true or false; for more, use an input tensor"
            )
    return parameters  # type: ignore[return-value]


def check(parameters: Mapping[str, object]) -> None:
    """Refuse what begins with `triton_`, but for the one that asks for the end of a stream, and known ones of a wrong type.

    The texts are Triton's.
    """
    for name, value in parameters.items():
        kinds = _TYPES.get(name)
        if kinds is None:
            if name.startswith("triton_"):
                raise InvalidArgument(
                    "parameter keys starting with 'triton_' are reserved for Triton usage, only "
                    f"'{EMPTY_FINAL}' can be specified in request"
                )
        elif type(value) not in kinds:
            expected = " or ".join(_FIELDS[kind] for kind in kinds)
            raise InvalidArgument(f"invalid value type for '{name}' parameter, expected {expected}.")


class HeaderForwarding:
    """Makes parameters of the fields that match a pattern; the case of letters does not count, as in all of HTTP."""

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern.encode(), re.IGNORECASE)
        except re.error as error:
            raise FailedPrecondition(f"header pattern {pattern!a} is not a regular expression: {error}") from None

    def merged(self, head: RequestHead, parameters: Parameters) -> Parameters:
        """The request's own parameters and those made of its fields, named in lower case; its own win."""
        forwarded: dict[str, ParameterValue] = {}
        for field, value in head.fields:
            if self._pattern.fullmatch(field):
                name = field.decode("latin-1")
                if name not in _TYPES and name != "headers" and not name.startswith("triton_"):
                    forwarded[name] = value.decode("latin-1")
        return {**forwarded, **parameters} if forwarded else parameters


def forwarding(pattern: str) -> HeaderForwarding | None:
    """None where nothing is passed on."""
    return HeaderForwarding(pattern) if pattern else None
