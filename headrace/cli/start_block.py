# SPDX-License-Identifier: Apache-2.0
"""The block that `headrace serve` prints on a terminal when it is ready: addresses, and which models serve."""

from __future__ import annotations

from headrace.core.telemetry.logs import one_line
from headrace.programs.serve.settings import StartReport
from headrace.version import __version__

_NAMES = 8
"""More models are counted rather than named."""


def start_block(report: StartReport) -> str:
    """Return the block as text."""
    count = len(report.ready)
    names = ", ".join(report.ready[:_NAMES]) + (f" and {count - _NAMES} more" if count > _NAMES else "")
    rows = {
        "HTTP": report.http,
        "gRPC": report.grpc,
        "metrics": report.metrics,
        "console": report.console,
        "API": report.documentation,
        "models": names or "none",
    }
    lines = [f"  {label:<9}{value}" for label, value in rows.items() if value]
    lines += [f"  failed   {name}: {one_line(reason)}" for name, reason in sorted(report.failed.items())]
    return "\n".join([f"Headrace {__version__} serves {count} model{'s' * (count != 1)}. Ctrl-C stops it.", *lines])
