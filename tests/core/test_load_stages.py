# SPDX-License-Identifier: Apache-2.0
"""The stages of a load: nested ones are not counted twice, threads take part, and nothing is recorded outside."""

from __future__ import annotations

import threading
from contextvars import copy_context

import pytest

from headrace.core.telemetry import load_stages
from headrace.core.telemetry.load_stages import COMPILE, OPEN, READ_WEIGHTS, WARM_UP, current_stages, recording, stage


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock."""
    clock = [100.0]
    monkeypatch.setattr(load_stages, "monotonic", lambda: clock[0])
    return clock


def test_what_is_inside_is_not_counted_twice(now: list[float]) -> None:
    with recording() as stages:
        for _ in range(2):
            with stage(OPEN):
                now[0] += 1
                with stage(READ_WEIGHTS):
                    now[0] += 10
                    with stage(COMPILE):
                        now[0] += 100
                now[0] += 0.5
        with stage(WARM_UP):
            now[0] += 0.001
    assert stages.seconds == pytest.approx({READ_WEIGHTS: 20, COMPILE: 200, OPEN: 3, WARM_UP: 0.001})
    assert list(stages.seconds) == [READ_WEIGHTS, COMPILE, OPEN, WARM_UP]
    assert str(stages) == "read weights 20 s, compile and capture 200 s, start instances 3 s"


def test_a_thread_takes_part_and_not_after_the_load(now: list[float]) -> None:
    def read() -> None:
        with stage(READ_WEIGHTS):
            now[0] += 7

    with recording() as stages, stage(OPEN):
        context = copy_context()
        thread = threading.Thread(target=context.run, args=(read,))
        thread.start()
        thread.join()
        now[0] += 1
    assert stages.seconds == pytest.approx({READ_WEIGHTS: 7, OPEN: 1})
    context.run(read)  # a model that wakes reads its weights again
    assert current_stages() is None
    read()
    assert stages.seconds == pytest.approx({READ_WEIGHTS: 7, OPEN: 1})


def test_a_stage_that_fails_is_counted(now: list[float]) -> None:
    with recording() as stages:
        with pytest.raises(ValueError, match="broken"), stage(OPEN), stage(READ_WEIGHTS):
            now[0] += 3
            raise ValueError("broken")
        with stage(COMPILE):
            now[0] += 1
    assert stages.seconds == pytest.approx({READ_WEIGHTS: 3, COMPILE: 1, OPEN: 0})
