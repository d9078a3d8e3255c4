# SPDX-License-Identifier: Apache-2.0
"""The lifecycle of a microservice: initializing, loading, ready or failed; and the state file.

The order in which flags are checked, the codes and the texts are those of TAO's container; clients compare them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from headrace.core.errors import FailedPrecondition
from headrace.core.files import write_atomically

Stage = Literal["initializing", "downloading_model", "downloading_file", "loading_model", "ready", "error"]

REMAINING: Mapping[Stage, tuple[str, ...]] = {
    "initializing": ("download model files", "load model"),
    "downloading_model": ("download model files", "load model"),
    "downloading_file": ("download model files", "load model"),
    "loading_model": ("load model",),
    "ready": (),
    "error": (),
}
"""Remaining steps at each stage."""
log = logging.getLogger("headrace.microservice")


@dataclass(frozen=True, slots=True)
class Flags:
    """The state flags that clients see."""

    server_initializing: bool = True
    initialization_error: str | None = None
    model_loading: bool = False
    model_load_error: str | None = None
    model_loaded: bool = False


class Phase(Enum):
    """The phase of a service; the value is `model_state` of `/api/v1/status`."""

    INITIALIZING = "initializing"
    INITIALIZATION_FAILED = "initialization_failed"
    LOADING = "loading"
    LOAD_FAILED = "load_failed"
    NOT_STARTED = "not_loaded"
    READY = "loaded"

    @property
    def failed(self) -> bool:
        """Return whether the phase is final and failed."""
        return self in (Phase.INITIALIZATION_FAILED, Phase.LOAD_FAILED)


def phase_of(flags: Flags) -> Phase:
    """Return the phase: the first flag that is set, in this order."""
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
    """The response to a request in any phase but READY."""

    status_code: int
    """HTTP status of an inference response; readiness is always 503, so that no probe takes a loading service for ready."""
    status: str
    """`status` of an inference response."""
    reason: str
    """`reason` of a readiness response."""
    error_type: str
    """`error.type` of a readiness and a chat response."""
    message: str
    retry_after_seconds: int | None
    """None if waiting does not help."""


_NOT_READY: Mapping[Phase, NotReady] = {
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
    """Return the response to a request; None if the model is ready."""
    phase = phase_of(flags)
    response = _NOT_READY.get(phase)
    if response is None or not phase.failed:
        return response
    cause = flags.initialization_error if phase is Phase.INITIALIZATION_FAILED else flags.model_load_error
    return replace(response, message=response.message + (cause or ""))


@dataclass(frozen=True, slots=True)
class Progress:
    """The startup progress of a service."""

    stage: Stage
    message: str
    timestamp: str
    remaining_steps: Sequence[str] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the progress as `/api/v1/status` shows it."""
        return {
            "stage": self.stage,
            "message": self.message,
            "remaining_steps": list(self.remaining_steps),
            "details": dict(self.details),
            "timestamp": self.timestamp,
        }


class Lifecycle:
    """Flags and progress of a service. Each transition happens once, in the order of the methods."""

    def __init__(self, timestamp: str) -> None:
        self.flags = Flags()
        self.progress = Progress("initializing", "Server is starting", timestamp, REMAINING["initializing"])

    @property
    def phase(self) -> Phase:
        """Return the phase."""
        return phase_of(self.flags)

    def report(self, stage: Stage, message: str, timestamp: str, details: Mapping[str, Any] | None = None) -> None:
        """Set the progress without a transition."""
        self.progress = Progress(stage, message, timestamp, REMAINING[stage], details or {})

    def initialized(self) -> None:
        """The files are downloaded. Until loading starts, no flag is set."""
        self._transition(Phase.INITIALIZING, Flags(server_initializing=False))

    def initialization_failed(self, cause: str, timestamp: str) -> None:
        """The download failed."""
        self._transition(Phase.INITIALIZING, Flags(server_initializing=False, initialization_error=cause))
        self.report("error", f"Server initialization failed: {cause}", timestamp)

    def loading(self, timestamp: str) -> None:
        """The model is loading."""
        self._transition(Phase.NOT_STARTED, Flags(server_initializing=False, model_loading=True))
        self.report("loading_model", "Loading the model", timestamp)

    def load_failed(self, cause: str, timestamp: str) -> None:
        """Loading failed."""
        self._transition(Phase.LOADING, Flags(server_initializing=False, model_load_error=cause))
        self.report("error", f"Model failed to load: {cause}", timestamp)

    def loaded(self, timestamp: str) -> None:
        """The model is ready."""
        self._transition(Phase.LOADING, Flags(server_initializing=False, model_loaded=True))
        self.report("ready", "Model is ready", timestamp)

    def _transition(self, before: Phase, flags: Flags) -> None:
        if self.phase is not before:
            raise RuntimeError(f"a service that is {self.phase.value} cannot become {phase_of(flags).value}")
        self.flags = flags


def prepare_folder(folder: Path) -> Path:
    """Create the folder if needed; raise if it belongs to another user."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.stat(folder)
    except OSError as error:
        raise FailedPrecondition(
            f"the folder {folder} cannot be created: {error.strerror}; choose another with --models-dir"
        ) from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (os.geteuid(), 0):
        raise FailedPrecondition(f"{folder} is not a folder of this user: choose another with --models-dir")
    return folder


class StateFile:
    """The state file `<folder>/<job_id>_server.json`, for programs on the same machine.

    It is readable by its owner only, has no secrets and is written atomically. Errors are logged once and not raised.
    """

    def __init__(self, folder: Path, job_id: str) -> None:
        self.path = folder / f"{job_id}_server.json"
        self._failed = False

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the file."""
        try:
            prepare_folder(self.path.parent)
            write_atomically(self.path, json.dumps(state, indent=2).encode(), durable=False)
        except (OSError, FailedPrecondition) as error:
            if not self._failed:
                text = error.message if isinstance(error, FailedPrecondition) else error.strerror
                log.warning("Could not write the state file %s: %s", self.path, text)
            self._failed = True

    def remove(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            self.path.unlink()
