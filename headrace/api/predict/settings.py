# SPDX-License-Identifier: Apache-2.0
"""Settings of `/predict`. A module of its own, so that the command line need not import the handlers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class InputChecks:
    """Limits on inputs, checked before the model runs."""

    enabled: bool = True
    most_numbers: int = 10_000
    """Maximum numbers in one prediction's inputs; 0: unlimited."""
    most_rows: int = 1_000
    """Maximum predictions in one `batch`; 0: unlimited."""
    longest_sequence: int = 0
    """Maximum size of any dimension (`max_sequence_length`); 0: unlimited."""
    least: float | None = None
    most: float | None = None
    """Bounds of every number (`least`, `most`)."""
    allow_nan: bool = False
    """Whether to accept NaN and infinities."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Settings of the WebSocket."""

    idle_seconds: float = 60.0
    """Close a connection without messages after this time, with code 1000."""
    messages_per_second: float = 100.0
    """Rate limit of one connection; 0: unlimited."""
    binary: bool = True
    """Whether to accept binary messages: raw numbers, for models with one input."""


@dataclass(frozen=True, slots=True)
class PredictSettings:
    """Settings of all transports."""

    model: str = ""
    """The model of `/predict` without a name; "" for the only model."""
    timeout_seconds: float = 30.0
    """Fail a request after this time; 0: never."""
    checks: InputChecks = field(default_factory=InputChecks)
    stream: StreamSettings = field(default_factory=StreamSettings)
