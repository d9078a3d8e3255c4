# SPDX-License-Identifier: Apache-2.0
"""The errors of `triton_python_backend_utils`, and how an exception of the model is formatted."""

from __future__ import annotations

import os
import traceback
from enum import IntEnum
from types import TracebackType


class ErrorCode(IntEnum):
    """Triton's error codes."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """The error of a response, in place of outputs."""

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        self._message = str(message)
        self._code = ErrorCode(code)

    def message(self) -> str:
        """Return the message."""
        return self._message

    def code(self) -> ErrorCode:
        """Return the error code."""
        return self._code

    def __str__(self) -> str:
        """Return the message."""
        return self._message


class TritonModelException(Exception):  # models use this name
    """The exception that models raise, and that this module raises for misuse."""

    # The module name that Triton shows in messages.
    __module__ = "c_python_backend_utils"

    def message(self) -> str:
        """Return the message."""
        return str(self)


def format_error(error: BaseException, model_file: str) -> str:
    """Format an exception as Triton does: its last line, then the stack, innermost frame first."""
    line = "".join(traceback.format_exception_only(type(error), error)).strip()
    places = _stack_lines(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        line = f"{type(error).__name__}: {error.msg}"
        places.insert(0, f"  {error.filename}({error.lineno})")
    if not places:
        places = [f"  {model_file}"]
    return f"{line}\n\nAt:\n" + "\n".join(places) + "\n"


def _stack_lines(trace: TracebackType | None) -> list[str]:
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    places = [
        f"  {frame.filename}({frame.lineno}): {frame.name}"
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith((own, "<frozen importlib"))
    ]
    return places[::-1]
