# SPDX-License-Identifier: Apache-2.0
"""What is being worked on right now: the fields that every log line carries without being told.

Bound by the data plane and the job runners around their work; read by `logs`. The fields follow tasks and callbacks as
context variables do; they do not cross into a thread or a process by themselves. Must not know where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from types import MappingProxyType, TracebackType
from typing import TypedDict, Unpack, cast


class Fields(TypedDict, total=False):
    """What there is to be bound."""

    request_id: str
    model: str
    version: str
    job: str


# One variable for all of them, so that binding three costs what binding one costs.
_fields: ContextVar[Mapping[str, str]] = ContextVar("headrace_fields", default=MappingProxyType({}))


def fields() -> Mapping[str, str]:
    """Return the fields that are bound here, by name."""
    return _fields.get()


def bind(**values: Unpack[Fields]) -> None:
    """Set some of the fields for the rest of this task or callback: for whoever owns the whole of it."""
    _fields.set(_with(values))


class bound:  # noqa: N801 - lower case like `contextlib.suppress`: it is used as a verb
    """`with bound(model="m"):` sets some of the fields inside, and puts them back as they were."""

    __slots__ = ("_token", "_values")

    def __init__(self, **values: Unpack[Fields]) -> None:
        self._values = values

    def __enter__(self) -> None:
        """Set the fields."""
        self._token: Token[Mapping[str, str]] = _fields.set(_with(self._values))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the fields back."""
        _fields.reset(self._token)


def _with(values: Fields) -> Mapping[str, str]:
    return {**_fields.get(), **cast("Mapping[str, str]", values)}
