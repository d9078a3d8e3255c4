# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of both generations."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from headrace.core.schemas import Schema

PACKAGE = "nvidia.inferenceserver"
SERVICE = f"{PACKAGE}.GRPCService"


@cache
def nvidia_schema() -> Schema:
    """Loaded at first use, then kept."""
    return Schema((files("headrace.api.v1") / "_generated" / "nvidia.binpb").read_bytes())


@cache
def message_class(name: str) -> Any:
    """A message by its name within the package; with `v0.` in front, of the older generation."""
    return nvidia_schema().message(f"{PACKAGE}.{name}")
