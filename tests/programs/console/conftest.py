# SPDX-License-Identifier: Apache-2.0
"""A browser and a gateway for the tests of the console."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For one module: as long as it is there its event loop is the thread's, and no other test could run one."""
    from console_tab import chromium

    with chromium() as running:
        yield running


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One gateway for all tests of its console."""
    from gateway_with_users import gateway_with_users

    with gateway_with_users(tmp_path_factory.mktemp("gateway")) as made:
        yield made
