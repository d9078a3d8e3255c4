# SPDX-License-Identifier: Apache-2.0
"""Tests that await."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import uvloop


def async_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine function as a test, in the event loop that servers use."""

    @wraps(test)
    def run(*values: Any, **fixtures: Any) -> None:
        uvloop.run(test(*values, **fixtures))

    return run
