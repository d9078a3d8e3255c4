# SPDX-License-Identifier: Apache-2.0
"""Parts of requests that both transports share: parameters, header forwarding, cached layouts, and errors with request ids.

A client sends the same request again and again: the same names, types, shapes and options, byte for byte, around other
numbers. The codecs cache the layout of such a request (`RequestLayout`) and take the numbers from their known position
without parsing.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

import numpy as np
import orjson

from headrace.core.dtypes import BYTES
from headrace.core.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    ResourceExhausted,
    Unimplemented,
    with_message,
)
from headrace.core.requests import InferRequest, Parameters, ParameterValue
from headrace.core.tensors import Buffer, Tensor
from headrace.engine.dataplane import DataPlane
from headrace.engine.sequences.controls import SequenceFlagsError
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
"""Parameters with a meaning for the server. Forwarded headers cannot set them."""
_FIELDS = {int: "int64_param", str: "string_param", bool: "bool_param"}


NAME_LENGTH = 1024
"""Maximum characters of a tensor's name, which error messages quote."""
_ID_LENGTH = 128


def checked_parameters(parameters: Mapping[str, object]) -> Parameters:
    """Return a request's parameters after checking names and types."""
    check_parameters(parameters)
    for name, value in parameters.items():
        if type(value) not in _KINDS:
            raise InvalidArgument(
                f"parameter {name[:64]!a} has invalid type. It should be either 'int', 'bool', or 'string'; for more, use "
                "an input tensor"
            )
    return parameters  # type: ignore[return-value]


def check_parameters(parameters: Mapping[str, object]) -> None:
    """Raise for reserved names (`triton_*`, except `EMPTY_FINAL`) and wrong types, with Triton's messages."""
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
    """Turns header fields whose name matches a pattern into request parameters.

    Patterns are in RE2's syntax, as Triton's are: `(?i)` at the start ignores case, `(?-i)` does not. HTTP/1.1 clients
    write names in any case, so over HTTP a pattern ignores case unless it says otherwise; gRPC's names are lower case.
    """

    def __init__(self, pattern: str, *, ignore_case: bool) -> None:
        text = pattern
        while (flag := re.match(r"\(\?(-?)i\)", text)) is not None:
            ignore_case = not flag[1]
            text = text[flag.end() :]
        try:
            self._pattern = re.compile(text.encode(), re.IGNORECASE if ignore_case else 0)
        except re.error as error:
            raise FailedPrecondition(f"header pattern {pattern!a} is not a regular expression: {error}") from None

    def merged(self, head: RequestHead, parameters: Parameters) -> Parameters:
        """Return the request's parameters with those from its header fields; the request's own take precedence."""
        forwarded: dict[str, ParameterValue] = {}
        for field, value in head.fields:
            if self._pattern.fullmatch(field):
                name = field.decode("latin-1")
                if name in _TYPES or name == "headers" or name.startswith("triton_"):
                    raise InvalidArgument(
                        f"header '{name[:64]}' matches the header-forward-pattern, and a parameter of that name is "
                        "reserved for Triton usage: set it in the request"
                    )
                forwarded[name] = value.decode("latin-1")
        return {**forwarded, **parameters} if forwarded else parameters


def header_forwarding(pattern: str, *, ignore_case: bool) -> HeaderForwarding | None:
    """Return the forwarding for a pattern; None for an empty one."""
    return HeaderForwarding(pattern, ignore_case=ignore_case) if pattern else None


class RequestLayout:
    """A request with one tensor of fixed-size elements, without its numbers."""

    __slots__ = ("_dtype", "_name", "_shape", "_template", "size")

    def __init__(self, request: InferRequest, size: int) -> None:
        tensor = request.inputs[0]
        self._name = tensor.name
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        # Without its tensor, so that the first request's numbers can be freed.
        self._template = InferRequest(
            request.model_name, (), request.model_version, "", request.outputs, request.parameters
        )
        self.size = size
        """Size of the tensor in bytes."""

    def request(self, buffer: Buffer, offset: int = 0) -> InferRequest:
        """Return the request with the numbers at `offset`; the caller has checked that there are `size` bytes."""
        template = self._template
        array = np.ndarray(self._shape, self._dtype.numpy, buffer, offset)
        return InferRequest(
            template.model_name,
            (Tensor(self._name, self._dtype, array),),
            template.model_version,
            "",
            template.outputs,
            template.parameters,
        )


class JsonLayout:
    """A JSON request with one numeric tensor: the text after its numbers, and what `RequestLayout` has."""

    __slots__ = ("_layout", "_pack", "_rest")

    def __init__(self, request: InferRequest, rest: bytes) -> None:
        tensor = request.inputs[0]
        self._layout = RequestLayout(request, tensor.array.nbytes)
        self._pack = struct.Struct(f"<{tensor.array.size}{tensor.dtype.struct_code}").pack
        self._rest = rest

    def request(self, body: bytes, start: int) -> InferRequest | None:
        """Return the request whose numbers begin at `start`; None if anything but the numbers differs, or one is wrong."""
        rest = self._rest
        if not body.endswith(rest):
            return None
        numbers = body[start : -len(rest)]
        # `pack` takes true and false for numbers, so no such letter may be in the text. No number has one of them.
        if _LETTER_U in numbers or _LETTER_L in numbers:
            return None
        try:
            data = self._pack(*orjson.loads(numbers))
        except (ValueError, TypeError, OverflowError, struct.error):
            return None
        return self._layout.request(data)


_LETTER_U, _LETTER_L = b"ul"
"""Of true and of false. As integers: looking for those in bytes is ten times as quick as for bytes."""


def has_layout(request: InferRequest) -> bool:
    """Return whether a request has the simple form of a layout. A request with an id differs each time."""
    return len(request.inputs) == 1 and not request.id and request.inputs[0].dtype is not BYTES


def with_request_id(plane: DataPlane, request: InferRequest, error: HeadraceError, endpoint: str) -> HeadraceError:
    """Return the error with the request's id, like Triton's core.

    Errors in the bytes of a request, unknown models and errors about sequence flags have no id. `endpoint` is named for
    models that it does not support.
    """
    if isinstance(error, SequenceFlagsError) or not isinstance(
        error, InvalidArgument | ResourceExhausted | Unimplemented
    ):
        return error
    version = plane.find(request.model_name, request.model_version)
    if version is None:
        return error
    if isinstance(error, Unimplemented):
        if not version.config.decoupled:
            return error
        return with_message(
            error, f"{endpoint} doesn't support models with decoupled transaction policy: {error.message}"
        )
    return with_message(error, f"[request id: {request.id[:_ID_LENGTH] or '<id_unknown>'}] {error.message}")
