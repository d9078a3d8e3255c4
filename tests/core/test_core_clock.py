# SPDX-License-Identifier: Apache-2.0
"""The clock, the buffers and the limits: small things everyone stands on."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.buffers import uninitialised
from headrace.core.clock import Clock, ManualClock, SystemClock
from headrace.core.limits import Limits
from headrace.core.requests import NO_PARAMETERS, InferRequest, InferResponse


def test_the_system_clock_is_the_machines():
    clock: Clock = SystemClock()
    before = time.monotonic(), time.time()
    now = clock.monotonic(), clock.wall()
    after = time.monotonic(), time.time()
    assert before[0] <= now[0] <= after[0]
    assert before[1] <= now[1] <= after[1]


@given(st.lists(st.floats(0, 1e6)))
def test_a_manual_clock_moves_only_when_advanced(steps):
    clock: Clock = ManualClock(start=5.0, wall=1000.0)
    expected = 5.0
    for step in steps:
        clock.advance(step)
        expected += step
        assert clock.monotonic() == clock.monotonic() == expected
        assert clock.wall() == pytest.approx(expected + 995.0)


def test_a_manual_clock_does_not_go_backwards():
    clock = ManualClock()
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-0.001)
    assert clock.monotonic() == 0.0


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_memory_has_the_size_and_can_be_written(size):
    memory = uninitialised(size)
    memory[:] = b"x" * size
    assert (memory.nbytes, memory.format, memory.readonly, bytes(memory)) == (size, "B", False, b"x" * size)
    assert np.frombuffer(memory, np.uint8).size == size


@pytest.mark.parametrize("field", dataclasses.fields(Limits), ids=lambda field: field.name)
def test_each_limit_limits(field):
    limits = Limits()
    assert getattr(limits, field.name) > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(limits, field.name, 1)


def test_requests_share_their_empty_parameters_and_cannot_spoil_them():
    assert InferRequest("m", []).parameters is InferResponse("m", "1", []).parameters is NO_PARAMETERS
    with pytest.raises(TypeError):
        NO_PARAMETERS["a"] = 1
