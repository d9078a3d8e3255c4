# SPDX-License-Identifier: Apache-2.0
"""Disable the telemetry of third-party libraries. Packages call this before they import such a library.

ONNX Runtime since 1.29 sends model names, and more, to Microsoft from Linux too. It reads its variable once, while it is
loaded; setting it later has no effect. Model processes inherit the variables. A variable that is already set is not
changed.
"""

from __future__ import annotations

import os

_VARIABLES = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY")


def refuse_telemetry() -> None:
    """Disable library telemetry in this process and its children."""
    for name in _VARIABLES:
        os.environ.setdefault(name, "1")
