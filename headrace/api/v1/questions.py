# SPDX-License-Identifier: Apache-2.0
"""The short questions, the same over both transports: is it alive, is it ready, may it be profiled."""

from __future__ import annotations

from headrace.api.v1.accounts import UnknownMode, V1Settings
from headrace.core.errors import InvalidArgument, Unimplemented
from headrace.engine.dataplane import DataPlane


def health(plane: DataPlane, mode: str) -> bool:
    """Whether the server is `live`, or `ready`."""
    if mode == "live":
        return True
    if mode == "ready":
        return plane.ready
    raise UnknownMode(f"unknown health mode '{mode[:64]}'")


def profile(settings: V1Settings, command: str) -> None:
    """Begin or end profiling, of which this server has none: allowed, it changes nothing."""
    if not settings.allow_profiling:
        raise Unimplemented("Profile API not enabled")
    if command not in ("start", "stop"):
        raise InvalidArgument(f"unknown profile command '{command[:64]}': use 'start' or 'stop'")
