# SPDX-License-Identifier: Apache-2.0
"""The errors of `triton_python_backend_utils`, and how an exception of the model is formatted."""

from __future__ import annotations

import os
import traceback
from enum import IntEnum


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


def describe_error(error: BaseException, model_file: str) -> str:
    """Return an exception in one line: Python's own last line, and where in the model's files it happened."""
    if isinstance(error, SyntaxError) and error.filename:
        line = f"{type(error).__name__}: {error.msg}"
        return f"{line} ({_shown(error.filename, model_file)}:{error.lineno})"
    # The exception that models raise on purpose: its class says nothing more.
    is_intended = isinstance(error, TritonModelException) and str(error)
    line = str(error) if is_intended else "".join(traceback.format_exception_only(type(error), error))
    place = _place(error, model_file)
    where = (
        f"{_shown(place.filename, model_file)}:{place.lineno}"
        if place
        else ""
        if is_intended
        else shown_file(model_file)
    )
    return " ".join(line.split()) + (f" ({where})" if where else "")


def is_raised_by_model(error: BaseException, model_file: str) -> bool:
    """Return whether a `raise` in the model's files raised it, so that its text is meant for a reader."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not _is_of_model(frames[-1], model_file):
        return False
    return (frames[-1].line or "").lstrip().startswith("raise")


def format_trace(error: BaseException) -> str:
    """Return the traceback for the log, without the frames of Headrace."""
    own = _own_folder()
    lines = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = lines
    while part is not None:
        kept = [frame for frame in part.stack if not frame.filename.startswith((own, "<frozen importlib"))]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(lines.format())


def shown_file(model_file: str) -> str:
    """Return a model's file as messages name it: below the repository, `name/1/model.py`."""
    return _shown(model_file, model_file)


def _place(error: BaseException, model_file: str) -> traceback.FrameSummary | None:
    """Return the innermost frame in the model's own files."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if _is_of_model(frame, model_file)), None)


def _is_of_model(frame: traceback.FrameSummary, model_file: str) -> bool:
    return frame.filename.startswith(_model_folder(model_file) + os.sep)


def _shown(path: str, model_file: str) -> str:
    repository = os.path.dirname(_model_folder(model_file)) + os.sep
    return path.removeprefix(repository) if path.startswith(repository) else os.path.basename(path)


def _model_folder(model_file: str) -> str:
    return os.path.dirname(os.path.dirname(model_file))


def _own_folder() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
