# SPDX-License-Identifier: Apache-2.0
"""Imports OpenVINO without its telemetry. Called once, when `backends.openvino.backend` is imported.

`import openvino` reports itself to a server of Google's, from a process of its own that it starts, unless the user has
opted out. Where its package openvino-telemetry is not installed it uses a stub that does nothing; so for the time of the
import it is not.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_TELEMETRY = "openvino_telemetry"


def import_openvino() -> Any:
    """The module. Raises ImportError where it is not installed."""
    known = sys.modules.get(_TELEMETRY)
    # None is Python's own word for a module that cannot be imported.
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        return import_module("openvino")
    finally:
        if known is None:
            del sys.modules[_TELEMETRY]
        else:
            sys.modules[_TELEMETRY] = known
