# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of `/predict`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from headrace.core.schemas import Schema

SERVICE = "InferenceService"


@cache
def predict_schema() -> Schema:
    """Loaded at first use, then kept."""
    return Schema((files("headrace.api.predict") / "_generated" / "predict.binpb").read_bytes())
