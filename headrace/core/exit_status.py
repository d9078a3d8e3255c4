# SPDX-License-Identifier: Apache-2.0
"""How a child process ended, as text."""

from __future__ import annotations

import signal


def describe_exit(code: int) -> str:
    """Return the exit code or the signal of a `returncode`: `exit code 1`, `signal 11: segmentation fault`."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}: {(signal.strsignal(-code) or 'unknown').lower()}"
