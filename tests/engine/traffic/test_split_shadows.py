# SPDX-License-Identifier: Apache-2.0
"""Copies for a candidate: compared, bounded, and of no consequence for who asked."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from split_planes import ONE, World, failing, in_a_loop, same, world_of

from headrace.core.dtypes import BF16, float32_to_bf16
from headrace.core.tensors import Tensor
from headrace.engine.traffic.shadow import MAX_IN_FLIGHT, compare_answers
from headrace.models.config.types import DynamicBatching, InputSpec, InstanceGroup, OutputSpec
from support.engines import Gate, Streamed


async def quiet(world: World) -> None:
    """Until no copy is under way."""
    shadows = world.traffic._splits["m"].shadows
    async with asyncio.timeout(30):
        while any(shadow.in_flight for shadow in shadows):
            await asyncio.sleep(0)


def shifted(by: float) -> Any:
    return lambda inputs: {"OUTPUT0": inputs["INPUT0"] + np.float32(by)}


@in_a_loop
@pytest.mark.parametrize("scheduling", [None, DynamicBatching()], ids=["short way", "long way"])
async def test_answers_are_compared_and_never_returned(scheduling: Any) -> None:
    def flipped(inputs: Any) -> Any:
        return {"OUTPUT0": np.ascontiguousarray(inputs["INPUT0"][:, ::-1])}

    world = await world_of(same, shifted(1e-7), shifted(0.5), flipped, scheduling=scheduling)
    world.split("1=1", shadows={"2": 1.0, "3": 1.0, "4": 1.0})
    rising = np.arange(4, dtype=np.float32).reshape(1, 4)
    assert {await world.ask(array=rising) for _ in range(20)} == {"1"}
    await quiet(world)
    good, off, other = world.of("2"), world.of("3"), world.of("4")
    assert (good["compared"], good["agreement"], good["argmax_agreement"]) == (20, 1.0, 1.0)
    assert (off["agreement"], off["argmax_agreement"]) == (0.0, 1.0)
    assert off["difference"]["max"] == pytest.approx(0.5, rel=0.01)
    assert (other["agreement"], other["argmax_agreement"]) == (0.0, 0.0)
    assert other["difference"]["max"] == pytest.approx(3, rel=0.01)
    assert world.metric("headrace_traffic_shadow_requests_total", version="2", outcome="agreed") == 20
    assert world.metric("headrace_traffic_shadow_requests_total", version="3", outcome="differed") == 20
    assert world.of("1")["requests"] == good["requests"] == 20
    await world.close()


@in_a_loop
async def test_a_shadow_that_fails_or_is_missing_affects_no_request() -> None:
    world = await world_of(same, failing)
    world.split("1=1", shadows={"2": 1.0})
    assert {await world.ask() for _ in range(5)} == {"1"}
    await quiet(world)
    assert (world.of("2")["errors"], world.of("2")["compared"]) == (5, 0)
    await world.unload(2)
    assert {await world.ask() for _ in range(5)} == {"1"}
    assert (world.of("2")["dropped"], world.of("2")["state"]) == (5, "missing")
    await world.close()


@in_a_loop
async def test_only_so_many_copies_are_under_way_and_the_others_are_counted() -> None:
    world = await world_of(same)
    gate = Gate()
    await world.load(2, gate, instance_groups=(InstanceGroup("m", runs="thread"),), max_batch_size=1)
    world.split("1=1", shadows={"2": 1.0})
    for _ in range(MAX_IN_FLIGHT + 30):
        assert await world.ask() == "1"  # while the candidate does not answer at all
    assert world.of("2")["dropped"] == 30
    gate.let(MAX_IN_FLIGHT)
    await quiet(world)
    assert world.of("2")["compared"] == MAX_IN_FLIGHT
    # What nobody waits for any more is given up.
    for _ in range(3):
        await world.ask()
    await gate.entered(MAX_IN_FLIGHT + 1)
    world.traffic.remove("m")
    gate.let(3)
    await world.close()


@in_a_loop
async def test_a_share_is_copied() -> None:
    world = await world_of(same, same)
    world.split("1=1", shadows={"2": 0.25})
    for _ in range(2_000):
        await world.ask()
        await asyncio.sleep(0)
    await quiet(world)
    assert abs(world.of("2")["compared"] - 500) <= 5 * math.sqrt(2_000 * 0.25 * 0.75)
    streamed = Streamed(world.plane, "m", INPUT0=ONE)
    await streamed.all()
    await quiet(world)
    assert world.of("2")["dropped"] == 0
    await world.close()


@in_a_loop
async def test_large_answers_are_compared_too() -> None:
    world = World()
    more = {"inputs": (InputSpec("INPUT0", None, None),), "outputs": (OutputSpec("OUTPUT0", None, None),)}
    await world.load(1, same, **more)
    await world.load(2, shifted(2.0), **more)
    world.split("1=1", shadows={"2": 1.0})
    await world.ask(array=np.zeros((1, 100_000), np.float32))
    await quiet(world)
    assert world.of("2")["difference"]["max"] == pytest.approx(2, rel=0.01)
    await world.close()


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
