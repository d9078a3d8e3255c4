# SPDX-License-Identifier: Apache-2.0
"""The states of a service: initialising, loading, ready, or what went wrong.

Moved on by `steps`, asked by `service` and `routes` before every request. Pure: no clock of its own, no files, no HTTP. The
order in which the flags are looked at, the codes and the texts are those of TAO's container; clients in the field compare
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

Stage = Literal["initializing", "downloading_model", "downloading_file", "loading_model", "ready", "error"]


@dataclass(frozen=True, slots=True)
class Flags:
    """What clients see of a state. At birth, it initialises."""

    server_initializing: bool = True
    initialization_error: str | None = None
    model_loading: bool = False
    model_load_error: str | None = None
    model_loaded: bool = False


class Phase(Enum):
    """Where a service stands; the value is what `/api/v1/status` calls it."""

    INITIALIZING = "initializing"
    INITIALIZATION_FAILED = "initialization_failed"
    LOADING = "loading"
    LOAD_FAILED = "load_failed"
    NOT_STARTED = "not_loaded"
    READY = "loaded"

    @property
    def failed(self) -> bool:
        """Whether it will stay so."""
        return self in (Phase.INITIALIZATION_FAILED, Phase.LOAD_FAILED)


def phase_of(flags: Flags) -> Phase:
    """The one state that several flags mean: the first that holds, in this order."""
    if flags.server_initializing:
        return Phase.INITIALIZING
    if flags.initialization_error is not None:
        return Phase.INITIALIZATION_FAILED
    if flags.model_loading:
        return Phase.LOADING
    if flags.model_load_error is not None:
        return Phase.LOAD_FAILED
    return Phase.READY if flags.model_loaded else Phase.NOT_STARTED


@dataclass(frozen=True, slots=True)
class NotReady:
    """What a request is told that comes in a phase other than READY."""

    status_code: int
    """Of an inference request; readiness is 503 in all of them, so that no probe takes a loading service for a ready one."""
    word: str
    """`status` of an inference answer."""
    reason: str
    """`reason` of a readiness answer."""
    error_type: str
    """`error.type` of both, and of a chat answer."""
    message: str
    retry_after_seconds: int | None
    """None where waiting does not help."""


_TOLD: Mapping[Phase, NotReady] = {
    Phase.INITIALIZING: NotReady(
        202,
        "initializing",
        "server_initializing",
        "server_initializing",
        "Server is initializing (downloading files, setting up), please wait",
        5,
    ),
    Phase.INITIALIZATION_FAILED: NotReady(
        503, "error", "initialization_failed", "initialization_error", "Server initialization failed: ", None
    ),
    Phase.LOADING: NotReady(
        202, "loading", "model_loading", "model_loading", "Model is currently loading, please wait and try again", 10
    ),
    Phase.LOAD_FAILED: NotReady(503, "error", "model_load_failed", "model_load_error", "Model failed to load: ", None),
    Phase.NOT_STARTED: NotReady(
        503, "not_ready", "model_not_loaded", "model_not_ready", "Model not loaded yet, please try again later", 5
    ),
}


def not_ready(flags: Flags) -> NotReady | None:
    """What to tell a request; None when it may go on to the model."""
    phase = phase_of(flags)
    told = _TOLD.get(phase)
    if told is None or not phase.failed:
        return told
    cause = flags.initialization_error if phase is Phase.INITIALIZATION_FAILED else flags.model_load_error
    return replace(told, message=told.message + (cause or ""))


REMAINING: Mapping[Stage, tuple[str, ...]] = {
    "initializing": ("download model files", "load model"),
    "downloading_model": ("download model files", "load model"),
    "downloading_file": ("download model files", "load model"),
    "loading_model": ("load model",),
    "ready": (),
    "error": (),
}
"""What is still to come at each stage."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a service is, for people who wait."""

    stage: Stage
    message: str
    timestamp: str
    remaining_steps: Sequence[str] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As `/api/v1/status` shows it."""
        return {
            "stage": self.stage,
            "message": self.message,
            "remaining_steps": list(self.remaining_steps),
            "details": dict(self.details),
            "timestamp": self.timestamp,
        }


class Lifecycle:
    """A service's flags and progress. Its methods are the only moves there are; each is made once, in this order."""

    def __init__(self, timestamp: str) -> None:
        self.flags = Flags()
        self.progress = Progress("initializing", "Server is starting", timestamp, REMAINING["initializing"])

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        return phase_of(self.flags)

    def report(self, stage: Stage, message: str, timestamp: str, details: Mapping[str, Any] | None = None) -> None:
        """Say how far it is, without a move."""
        self.progress = Progress(stage, message, timestamp, REMAINING[stage], details or {})

    def initialized(self) -> None:
        """The files are there. Until loading begins, no flag is set."""
        self._move(Phase.INITIALIZING, Flags(server_initializing=False))

    def initialization_failed(self, cause: str, timestamp: str) -> None:
        """The files cannot be had."""
        self._move(Phase.INITIALIZING, Flags(server_initializing=False, initialization_error=cause))
        self.report("error", f"Server initialization failed: {cause}", timestamp)

    def loading(self, timestamp: str) -> None:
        """The model is being loaded."""
        self._move(Phase.NOT_STARTED, Flags(server_initializing=False, model_loading=True))
        self.report("loading_model", "Loading the model", timestamp)

    def load_failed(self, cause: str, timestamp: str) -> None:
        """The model cannot be loaded."""
        self._move(Phase.LOADING, Flags(server_initializing=False, model_load_error=cause))
        self.report("error", f"Model failed to load: {cause}", timestamp)

    def loaded(self, timestamp: str) -> None:
        """The model answers."""
        self._move(Phase.LOADING, Flags(server_initializing=False, model_loaded=True))
        self.report("ready", "Model is ready", timestamp)

    def _move(self, before: Phase, flags: Flags) -> None:
        if self.phase is not before:
            raise RuntimeError(f"a service that is {self.phase.value} cannot become {phase_of(flags).value}")
        self.flags = flags
