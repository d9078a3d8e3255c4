# SPDX-License-Identifier: Apache-2.0
"""How long each stage of a model's load takes: reading the weights, moving them to the device, compiling, warming up.

    with recording() as stages:                    # around the load of one version
        with stage("read weights"):                # in the engine or a backend, in any thread that has the context
            ...
    stages.seconds                                 # {"read weights": 1.2}: what stages inside took is not counted twice

A load passes its context on to its threads. Outside of a load, `stage` does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic

CONFIGURATION = "configuration"
"""Reading the configuration, labels and the tokenizer."""
TRIAL = "trial load"
IMPORT = "import backend"
"""Importing the backend and its framework: long for the first model of a backend."""
READ_WEIGHTS = "read weights"
TO_DEVICE = "move to device"
COMPILE = "compile and capture"
OPEN = "start instances"
"""The rest of starting instances: sessions, KV caches, processes. Backends that do not say more read their weights here."""
WARM_UP = "warm up"
STAGES = (CONFIGURATION, TRIAL, IMPORT, READ_WEIGHTS, TO_DEVICE, COMPILE, OPEN, WARM_UP)
"""In the order in which they are shown."""

_LEAST_TEXT_SECONDS = 0.01
"""A stage that took less is left out of texts."""


class LoadStages:
    """The stages of one load. One of them runs at a time, though not always in the same thread."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._inside: list[float] = []
        """For each stage that runs: the time of the stages inside it."""
        self.ended = False

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each stage that took place."""
        return {name: self._seconds[name] for name in STAGES if name in self._seconds}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Time a stage; it may take place several times."""
        began = monotonic()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = monotonic() - began
            self._seconds[name] = self._seconds.get(name, 0.0) + took - self._inside.pop()
            if self._inside:
                self._inside[-1] += took

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {seconds:.3g} s" for name, seconds in self.seconds.items() if seconds >= _LEAST_TEXT_SECONDS
        )


_current: ContextVar[LoadStages | None] = ContextVar("load_stages", default=None)


@contextmanager
def recording() -> Iterator[LoadStages]:
    """Record the stages of a load."""
    stages = LoadStages()
    token = _current.set(stages)
    try:
        yield stages
    finally:
        stages.ended = True
        _current.reset(token)


def current_stages() -> LoadStages | None:
    """Return what records the load of this context; None outside of a load."""
    stages = _current.get()
    return None if stages is None or stages.ended else stages


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Time a stage of the load of this context."""
    stages = current_stages()
    if stages is None:
        yield
        return
    with stages.time(name):
        yield
