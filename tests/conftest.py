# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# `import serving` works from every test folder: it is a tool of the tests, not a package of the product.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """A verb that a test runs in this process sets levels and handlers, as it should; the next test must not have them."""
    root = logging.getLogger()
    ours = logging.getLogger("headrace")
    level, own_level, handlers = root.level, ours.level, list(root.handlers)
    yield
    root.setLevel(level)
    ours.setLevel(own_level)
    for handler in set(root.handlers).difference(handlers):
        root.removeHandler(handler)
