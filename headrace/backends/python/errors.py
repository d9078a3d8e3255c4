# SPDX-License-Identifier: Apache-2.0
"""Triton's error codes to our errors and back."""

from __future__ import annotations

from headrace.core.errors import (
    AlreadyExists,
    Cancelled,
    Code,
    HeadraceError,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
)

# By Triton's numbers: unknown, internal, not found, invalid argument, unavailable, unsupported, already exists, cancelled.
_CLASSES: tuple[type[HeadraceError], ...] = (
    Internal,
    Internal,
    NotFound,
    InvalidArgument,
    Unavailable,
    Unimplemented,
    AlreadyExists,
    Cancelled,
)
_INTERNAL, _INVALID, _UNAVAILABLE = 1, 3, 4
_NUMBERS = {
    Code.NOT_FOUND: 2,
    Code.INVALID_ARGUMENT: _INVALID,
    Code.TOO_LARGE: _INVALID,
    Code.UNAVAILABLE: _UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED: _UNAVAILABLE,
    Code.DEADLINE_EXCEEDED: _UNAVAILABLE,
    Code.FAILED_PRECONDITION: _UNAVAILABLE,
    Code.UNIMPLEMENTED: 5,
    Code.ALREADY_EXISTS: 6,
    Code.CANCELLED: 7,
}


def error_of(number: int, message: str) -> HeadraceError:
    """The error a model gave."""
    return (_CLASSES[number] if 0 <= number < len(_CLASSES) else Internal)(message)


def code_of(error: HeadraceError) -> int:
    """The number a model gets for an error."""
    return _NUMBERS.get(error.code, _INTERNAL)
