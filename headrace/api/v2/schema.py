# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of v2."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from headrace.core.schemas import Schema

SERVICE = "inference.GRPCInferenceService"


@cache
def inference_schema() -> Schema:
    """Loaded at first use, then kept."""
    return Schema((files("headrace.api.v2") / "_generated" / "inference.binpb").read_bytes())
