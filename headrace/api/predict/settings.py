# SPDX-License-Identifier: Apache-2.0
"""What `/predict` can be told. Filled from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class InputChecks:
    """What is refused before a model sees it."""

    enabled: bool = True
    most_numbers: int = 10_000
    """Numbers in one prediction's inputs; 0 for any."""
    most_rows: int = 1_000
    """Predictions in one `batch`; 0 for any."""
    longest_sequence: int = 0
    """The largest size of any dimension (`max_sequence_length`); 0 for any."""
    least: float | None = None
    most: float | None = None
    """Bounds of every number."""
    allow_nan: bool = False
    """NaN and infinities."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The WebSocket."""

    idle_seconds: float = 60.0
    """Without a message for so long it is closed, with 1000."""
    messages_per_second: float = 100.0
    """0 for any."""
    binary: bool = True
    """Whether binary messages are taken: raw numbers, for models with one input."""


@dataclass(frozen=True, slots=True)
class PredictSettings:
    """`/predict` in all its forms."""

    model: str = ""
    """The model of `/predict` without a name; "" for the only one there is."""
    timeout_seconds: float = 30.0
    """Then the request leaves its queue, or its answer is dropped, and the client is told; 0 for no end."""
    checks: InputChecks = field(default_factory=InputChecks)
    stream: StreamSettings = field(default_factory=StreamSettings)
