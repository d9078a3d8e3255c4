# SPDX-License-Identifier: Apache-2.0
"""The messages of gRPC's own services: health checking and reflection."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from headrace.core.schemas import Schema


@cache
def grpc_schema() -> Schema:
    """Loaded at first use, then kept."""
    return Schema((files("headrace.net.grpc") / "_generated" / "grpc.binpb").read_bytes())
