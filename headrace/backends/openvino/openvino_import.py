# SPDX-License-Identifier: Apache-2.0
"""Import OpenVINO without its telemetry.

`import openvino` starts a process that reports to a Google server, unless the user has opted out. If the package
openvino-telemetry is not installed, OpenVINO uses a stub that does nothing; so that package is hidden during the
import.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_TELEMETRY = "openvino_telemetry"


def import_openvino() -> Any:
    """Import and return openvino. Raise ImportError if it is not installed."""
    known = sys.modules.get(_TELEMETRY)
    # None in sys.modules makes an import fail.
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        return import_module("openvino")
    finally:
        if known is None:
            del sys.modules[_TELEMETRY]
        else:
            sys.modules[_TELEMETRY] = known
