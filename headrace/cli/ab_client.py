# SPDX-License-Identifier: Apache-2.0
"""A running server's admin API, for `headrace ab`."""

from __future__ import annotations

from typing import Any

from headrace.cli.client import ServerClient

_SECONDS = 30.0


class AdminClient(ServerClient):
    """One server."""

    def delete(self, path: str) -> Any:
        """Delete what is at a path; the answer's JSON."""
        return self._ask("DELETE", path, None, _SECONDS)
