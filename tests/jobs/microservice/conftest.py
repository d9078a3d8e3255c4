# SPDX-License-Identifier: Apache-2.0
"""`import service_process` works from here: tools of these tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from service_process import service, service_in_thread


@pytest.fixture(scope="module", params=["in this process", pytest.param("a process", marks=pytest.mark.slow)])
def open_service(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Use it as `service_process.service`, which it is, or the quicker `service_in_thread`."""
    return service if request.param == "a process" else service_in_thread
