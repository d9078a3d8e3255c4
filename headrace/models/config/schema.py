# SPDX-License-Identifier: Apache-2.0
"""The ModelConfig message. Asked for by the readers here and by backends that tell what their model's files say."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from headrace.core.schemas import Schema

CONFIG = "inference.ModelConfig"


@cache
def config_schema() -> Schema:
    """Loaded at first use, then kept."""
    return Schema((files("headrace.models.config") / "_generated" / "model_config.binpb").read_bytes())


def new_config(**fields: Any) -> Any:
    """A ModelConfig message."""
    return config_schema().message(CONFIG)(**fields)
