# SPDX-License-Identifier: Apache-2.0
"""The one model of this process, for the functions of `pb_utils`, which models call without any handle.

Bound by `main` before the model's file is read.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass

from headrace.backends.python.child.channel import Channel
from headrace.backends.python.child.errors import TritonModelException


@dataclass(slots=True)
class Session:
    """What the functions need."""

    channel: Channel
    model_folder: str
    decoupled: bool = False
    output_names: tuple[str, ...] = ()
    log_level: int = 20
    busy: bool = False
    """Whether the model is computing, so that a frame will follow soon."""
    awaited: object | None = None
    """Stands for the coroutine that the main thread waits for, while it does; see `in_awaited`."""

    def blocks(self) -> bool:
        """Whether no other request can be computed in this process until the caller of this function goes on."""
        if self.busy and threading.current_thread() is threading.main_thread():
            return True
        return self.awaited is not None and in_awaited.get() is self.awaited


in_awaited: ContextVar[object | None] = ContextVar("in_awaited", default=None)
"""What `Session.awaited` is, in that coroutine and in the tasks that it makes."""


class _Bound:
    session: Session | None = None


def bind(session: Session) -> None:
    """Make this the session of the process."""
    _Bound.session = session


def current() -> Session:
    """The session of the process."""
    if _Bound.session is None:
        raise TritonModelException("triton_python_backend_utils works only inside a model that Headrace has started")
    return _Bound.session
