# SPDX-License-Identifier: Apache-2.0
"""Points in time as the answers write them. Called wherever one is told."""

from __future__ import annotations

from datetime import UTC, datetime


def iso(wall: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
