# SPDX-License-Identifier: Apache-2.0
"""Libraries that report to their makers are told not to. Called by packages that import such a library, before they do.

ONNX Runtime since 1.29 sends the names of models, and more, to Microsoft from Linux too, and asks its variable once, when
it is loaded: to turn it off later stops only what was not yet noted. Processes of models inherit the variables. Whoever
has set one decides.
"""

from __future__ import annotations

import os

_VARIABLES = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY")


def refuse_telemetry() -> None:
    """For this process and those it starts."""
    for name in _VARIABLES:
        os.environ.setdefault(name, "1")
