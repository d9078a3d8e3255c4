# SPDX-License-Identifier: Apache-2.0
"""Copies for a candidate: compared, bounded, and of no consequence for who asked."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from split_planes import ONE, SplitPlane, echo, fail, open_split_plane

from headrace.core.dtypes import BF16, float32_to_bf16
from headrace.core.tensors import Tensor
from headrace.engine.traffic.shadow import MAX_IN_FLIGHT, compare_answers
from headrace.models.config.types import DynamicBatching, InputSpec, InstanceGroup, OutputSpec
from support.async_tests import async_test
from support.engines import Gate, Streamed


async def quiet(split_plane: SplitPlane) -> None:
    """Until no copy is under way."""
    shadows = split_plane.traffic._splits["m"].shadows
    async with asyncio.timeout(30):
        while any(shadow.in_flight for shadow in shadows):
            await asyncio.sleep(0)


def shifted(by: float) -> Any:
    return lambda inputs: {"OUTPUT0": inputs["INPUT0"] + np.float32(by)}


@async_test
@pytest.mark.parametrize("scheduling", [None, DynamicBatching()], ids=["short way", "long way"])
async def test_answers_are_compared_and_never_returned(scheduling: Any) -> None:
    def flipped(inputs: Any) -> Any:
        return {"OUTPUT0": np.ascontiguousarray(inputs["INPUT0"][:, ::-1])}

    split_plane = await open_split_plane(echo, shifted(1e-7), shifted(0.5), flipped, scheduling=scheduling)
    split_plane.split("1=1", shadows={"2": 1.0, "3": 1.0, "4": 1.0})
    rising = np.arange(4, dtype=np.float32).reshape(1, 4)
    assert {await split_plane.ask(array=rising) for _ in range(20)} == {"1"}
    await quiet(split_plane)
    good, off, other = split_plane.of("2"), split_plane.of("3"), split_plane.of("4")
    assert (good["compared"], good["agreement"], good["argmax_agreement"]) == (20, 1.0, 1.0)
    assert (off["agreement"], off["argmax_agreement"]) == (0.0, 1.0)
    assert off["difference"]["max"] == pytest.approx(0.5, rel=0.01)
    assert (other["agreement"], other["argmax_agreement"]) == (0.0, 0.0)
    assert other["difference"]["max"] == pytest.approx(3, rel=0.01)
    assert split_plane.metric("headrace_traffic_shadow_requests_total", version="2", outcome="agreed") == 20
    assert split_plane.metric("headrace_traffic_shadow_requests_total", version="3", outcome="differed") == 20
    assert split_plane.of("1")["requests"] == good["requests"] == 20
    await split_plane.close()


@async_test
async def test_a_shadow_that_fails_or_is_missing_affects_no_request() -> None:
    split_plane = await open_split_plane(echo, fail)
    split_plane.split("1=1", shadows={"2": 1.0})
    assert {await split_plane.ask() for _ in range(5)} == {"1"}
    await quiet(split_plane)
    assert (split_plane.of("2")["errors"], split_plane.of("2")["compared"]) == (5, 0)
    await split_plane.unload(2)
    assert {await split_plane.ask() for _ in range(5)} == {"1"}
    assert (split_plane.of("2")["dropped"], split_plane.of("2")["state"]) == (5, "missing")
    await split_plane.close()


@async_test
async def test_only_so_many_copies_are_under_way_and_the_others_are_counted() -> None:
    split_plane = await open_split_plane(echo)
    gate = Gate()
    await split_plane.load(2, gate, instance_groups=(InstanceGroup("m", runs="thread"),), max_batch_size=1)
    split_plane.split("1=1", shadows={"2": 1.0})
    for _ in range(MAX_IN_FLIGHT + 30):
        assert await split_plane.ask() == "1"  # while the candidate does not answer at all
    assert split_plane.of("2")["dropped"] == 30
    gate.let(MAX_IN_FLIGHT)
    await quiet(split_plane)
    assert split_plane.of("2")["compared"] == MAX_IN_FLIGHT
    # What nobody waits for any more is given up.
    for _ in range(3):
        await split_plane.ask()
    await gate.entered(MAX_IN_FLIGHT + 1)
    split_plane.traffic.remove("m")
    gate.let(3)
    await split_plane.close()


@async_test
async def test_a_share_is_copied() -> None:
    split_plane = await open_split_plane(echo, echo)
    split_plane.split("1=1", shadows={"2": 0.25})
    for _ in range(2_000):
        await split_plane.ask()
        await asyncio.sleep(0)
    await quiet(split_plane)
    assert abs(split_plane.of("2")["compared"] - 500) <= 5 * math.sqrt(2_000 * 0.25 * 0.75)
    streamed = Streamed(split_plane.plane, "m", INPUT0=ONE)
    await streamed.all()
    await quiet(split_plane)
    assert split_plane.of("2")["dropped"] == 0
    await split_plane.close()


@async_test
async def test_large_answers_are_compared_too() -> None:
    split_plane = SplitPlane()
    more = {"inputs": (InputSpec("INPUT0", None, None),), "outputs": (OutputSpec("OUTPUT0", None, None),)}
    await split_plane.load(1, echo, **more)
    await split_plane.load(2, shifted(2.0), **more)
    split_plane.split("1=1", shadows={"2": 1.0})
    await split_plane.ask(array=np.zeros((1, 100_000), np.float32))
    await quiet(split_plane)
    assert split_plane.of("2")["difference"]["max"] == pytest.approx(2, rel=0.01)
    await split_plane.close()


def compare(one: Any, other: Any, tolerance: float = 1e-5) -> tuple[bool, float | None, bool | None]:
    return tuple(compare_answers([Tensor.of("o", np.asarray(one))], [Tensor.of("o", np.asarray(other))], tolerance))  # type: ignore[return-value]


def test_comparing() -> None:
    assert compare([1, 2], [1, 2]) == (True, None, None)
    assert compare([1, 2], [1, 3]) == (False, None, None)
    assert compare(np.array([b"a"], object), np.array([b"b"], object)) == (False, None, None)
    assert compare([1.0, 2.0], [1.0, 2.0 + 1e-9]) == (True, pytest.approx(1e-9, rel=1e-3), True)
    assert compare([1.0, 2.0], [2.0, 1.0]) == (False, 1.0, False)
    assert compare([math.nan, math.inf], [math.nan, math.inf]) == (True, 0.0, True)
    assert compare([1.0], [math.nan]) == (False, math.inf, None)
    assert compare([math.inf], [-math.inf]) == (False, math.inf, None)
    assert compare([1.0], [1.0, 2.0]) == (False, None, None)
    assert compare([1.0], [1]) == (False, None, None)
    assert compare(np.zeros((0, 4)), np.zeros((0, 4))) == (True, None, None)
    assert compare(1.5, 1.25) == (False, 0.25, None)
    halves = [Tensor("o", BF16, float32_to_bf16(np.array([value, 2.0], np.float32))) for value in (1.0, 1.5)]
    assert compare_answers(halves[:1], halves[1:], 1e-5) == (False, 0.5, True)
    assert not compare_answers(halves[:1], [Tensor("p", BF16, halves[0].array)], 1e-5).agrees
