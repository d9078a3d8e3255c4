# SPDX-License-Identifier: Apache-2.0
"""Lets the tests of this folder import what they share, and runs `async def` tests in virtual time."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulated_fleet import SimulatedFleet


@pytest.fixture
def fleet(tmp_path: Path, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest) -> Iterator[SimulatedFleet]:
    """A fleet of a simulated machine; whatever the daemon calls a mistake of ours fails the test.

    More of its settings: `@pytest.mark.parametrize("fleet", [{"log_bytes": 1000}], indirect=True)`.
    """
    yield SimulatedFleet(tmp_path, **getattr(request, "param", {}))
    mistakes = [
        get_record
        for get_record in caplog.get_records("call")
        if get_record.levelno >= logging.ERROR and get_record.exc_info
    ]
    assert not mistakes, [mistake.getMessage() for mistake in mistakes]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Play an `async def` test with its fleet."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    fleet: SimulatedFleet = arguments["fleet"]
    fleet.run(pyfuncitem.obj(**arguments))
    return True
