# SPDX-License-Identifier: Apache-2.0
"""Where the tools of these tests are: beside them, and with the tests of what they look at."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for folder in ("backends", "language_models", "media", "microservice", "storage", "gateway", "fleet/local", "console"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For one module: as long as it is there its event loop is the thread's, and no other test could run one."""
    from console_tab import chromium

    with chromium() as running:
        yield running


@pytest.fixture(scope="session")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A gateway for all that look at one."""
    from gateway_used import used_gateway

    with used_gateway(tmp_path_factory.mktemp("gateway")) as made:
        yield made
