# SPDX-License-Identifier: Apache-2.0
"""Settings of every test run: how tests are spread over processes, what hypothesis does, and what is put back after a test."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# `from support.serving import serving` works from every test folder.
sys.path.insert(0, str(Path(__file__).parent))

# How quick a machine is decides nothing: neither by the time of one example nor by that of making one.
_PATIENT = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
# The same code has the same examples every time; `make fuzz` looks for others (`--hypothesis-profile=explore`).
hypothesis.settings.register_profile("headrace", _PATIENT, derandomize=True)
hypothesis.settings.register_profile("explore", _PATIENT)
hypothesis.settings.load_profile("headrace")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one worker process, so that its servers and models are made once.

    `pytest.mark.worker("tensorflow")` keeps several files together, so that an expensive import happens in one worker only.
    """
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        mark = item.get_closest_marker("worker")
        group = mark.args[0] if mark else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the objects of thousands of tests, which live until the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Clear the constants that `torch.export` remembers: at the interpreter's end torch could not free them quietly."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    if fakes is not None:
        for found in gc.get_objects():
            if type(found) is fakes.FakeTensorConverter:
                found.constant_storage_mapping.clear()


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """Undo what a command that a test ran in this process did to levels and handlers."""
    root = logging.getLogger()
    ours = logging.getLogger("headrace")
    level, own_level, handlers = root.level, ours.level, list(root.handlers)
    yield
    root.setLevel(level)
    ours.setLevel(own_level)
    for handler in set(root.handlers).difference(handlers):
        root.removeHandler(handler)
