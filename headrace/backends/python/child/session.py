# SPDX-License-Identifier: Apache-2.0
"""The state of this process's one model, for the functions of `pb_utils`, which take no handle.

`main` binds it before it imports the model's file.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass

from headrace.backends.python.child.channel import Channel
from headrace.backends.python.child.errors import TritonModelException


@dataclass(slots=True)
class Session:
    """What the functions of `pb_utils` need."""

    channel: Channel
    model_folder: str
    decoupled: bool = False
    output_names: tuple[str, ...] = ()
    log_level: int = 20
    busy: bool = False
    """Whether the model is computing, so that a frame follows soon."""
    awaited: object | None = None
    """Marks the coroutine that the main thread waits for; see `in_awaited`."""

    def blocks(self) -> bool:
        """Return whether this process can run no other request until the caller of this function continues."""
        if self.busy and threading.current_thread() is threading.main_thread():
            return True
        return self.awaited is not None and in_awaited.get() is self.awaited


in_awaited: ContextVar[object | None] = ContextVar("in_awaited", default=None)
"""The value of `Session.awaited` in that coroutine and in the tasks that it creates."""


class _Bound:
    session: Session | None = None


def bind(session: Session) -> None:
    """Set the session of the process."""
    _Bound.session = session


def current() -> Session:
    """Return the session of the process."""
    if _Bound.session is None:
        raise TritonModelException("triton_python_backend_utils works only inside a model that Headrace has started")
    return _Bound.session
