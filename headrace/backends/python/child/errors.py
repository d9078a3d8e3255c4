# SPDX-License-Identifier: Apache-2.0
"""The errors of `triton_python_backend_utils`, and how an exception of the model is told."""

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
    """What a response carries instead of outputs."""

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
        """The text."""
        return self._message

    def code(self) -> ErrorCode:
        """The kind of error."""
        return self._code

    def __str__(self) -> str:
        """The text."""
        return self._message


class TritonModelException(Exception):  # models know it by this name
    """What models raise, and what the functions of the module raise for misuse."""

    # As Triton tells it in messages.
    __module__ = "c_python_backend_utils"

    def message(self) -> str:
        """The text."""
        return str(self)


def told(error: BaseException, model_file: str) -> str:
    """An exception as Triton tells it: its last line, then the places it came through, innermost first."""
    line = "".join(traceback.format_exception_only(type(error), error)).strip()
    places = _places(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        line = f"{type(error).__name__}: {error.msg}"
        places.insert(0, f"  {error.filename}({error.lineno})")
    if not places:
        places = [f"  {model_file}"]
    return f"{line}\n\nAt:\n" + "\n".join(places) + "\n"


def _places(trace: TracebackType | None) -> list[str]:
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    places = [
        f"  {frame.filename}({frame.lineno}): {frame.name}"
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith((own, "<frozen importlib"))
    ]
    return places[::-1]
