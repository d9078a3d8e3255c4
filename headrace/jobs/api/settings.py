# SPDX-License-Identifier: Apache-2.0
"""What the gateway decides for the job API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobsApiSettings:
    """Frozen; times in seconds."""

    inference_seconds: float = 300.0
    """For a service to answer an inference request."""
    connect_seconds: float = 5.0
    """For a service to take a connection."""
    concurrency: int = 256
    """Inference requests of one service that may be in flight; one more is told to come back."""
    fresh_seconds: float = 1.0
    """How long where a service listens is believed without asking again: another gateway may have stopped it."""
    forget_seconds: float = 120.0
    """A service that nobody asked for so long is forgotten here, with its connections."""
    whole_bytes: int = 64 * 1024
    """Bodies of inference requests up to this size are passed on in one piece; longer ones as they come."""
