# SPDX-License-Identifier: Apache-2.0
"""What a service says by `:status_update` (facts 3.12): that it is idle, or will never serve, and wants to be stopped.

Read by `services`. The service is ours, but its words come over the network: nothing is taken on trust but the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import InvalidArgument

REQUESTED = "AUTO_DELETION_REQUESTED"
_MOST_ERROR = 900


@dataclass(frozen=True, slots=True)
class Ending:
    """How a service is to end, and what is told of it."""

    status: str
    """Done or Error."""
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


def read_update(payload: Mapping[str, Any]) -> Ending | None:
    """None for an update that asks for nothing."""
    told = payload.get("status")
    if isinstance(told, str) and told.lstrip().startswith("{"):
        try:
            told = json.loads(told)
        except (ValueError, RecursionError):
            raise InvalidArgument("status is no JSON object written as a string") from None
    if not isinstance(told, Mapping) or REQUESTED not in (told.get("status"), told.get("message")):
        return None
    reason, error = told.get("reason"), _text(told.get("error"))
    if reason == "initialization_failed":
        return Ending("Error", f"Server initialization failed: {error}", {"initialization_error": error})
    if reason == "model_loading_failed":
        return Ending("Error", f"Model failed to load: {error}", {"model_load_error": error})
    if reason == "idle_timeout_exceeded":
        minutes = told.get("idle_timeout_minutes")
        shown = f"{minutes:g}" if isinstance(minutes, int | float) and not isinstance(minutes, bool) else "some"
        return Ending("Done", f"stopped after {shown} minutes without a request")
    raise InvalidArgument("the reason of an auto-deletion is not known")


def _text(value: object) -> str:
    text = value if isinstance(value, str) and value else "the service did not say why"
    return text[:_MOST_ERROR].replace("\0", "?").encode("utf-8", "replace").decode()
