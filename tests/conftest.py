# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# `import serving` works from every test folder: it is a tool of the tests, not a package of the product.
sys.path.insert(0, str(Path(__file__).parent))

# How quick a machine is decides nothing: neither by the time of one example nor by that of making one.
_PATIENT = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
# The same code has the same examples every time; `make fuzz` looks for others (`--hypothesis-profile=explore`).
hypothesis.settings.register_profile("headrace", _PATIENT, derandomize=True)
hypothesis.settings.register_profile("explore", _PATIENT)
hypothesis.settings.load_profile("headrace")


def pytest_collection_finish() -> None:
    """What thousands of tests are made of lives until the end: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let go of what `torch.export` remembers of its constants: at the interpreter's end, torch could not do it quietly."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    if fakes is not None:
        for each in gc.get_objects():
            if type(each) is fakes.FakeTensorConverter:
                each.constant_storage_mapping.clear()


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
