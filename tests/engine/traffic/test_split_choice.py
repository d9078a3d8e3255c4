# SPDX-License-Identifier: Apache-2.0
"""Which version a request goes to: by chance within the binomial bound, by key always the same."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest
from split_planes import ONE, PLAIN, SplitPlane, echo, open_split_plane

from headrace.core.errors import NotFound
from headrace.core.requests import InferRequest
from headrace.engine.traffic.settings import StickyBy
from headrace.engine.traffic.version_choice import KeyHash, VersionChooser
from headrace.models.config.types import DynamicBatching, SequenceBatching
from support.async_tests import async_test
from support.engines import RecordingCaller, Streamed


def within(count: int, total: int, share: float) -> bool:
    """Five standard deviations: once in two million runs it would be wrong; the seed is fixed besides."""
    return abs(count - total * share) <= 5 * math.sqrt(total * share * (1 - share))


@async_test
async def test_a_hundred_thousand_requests_are_split_within_the_binomial_bound() -> None:
    split_plane = await open_split_plane(echo, echo, echo)
    split_plane.split("1=0.7 2=0.2 3=0.1")
    request = split_plane.request()
    seen: Counter[str] = Counter()
    for _ in range(100_000):
        answer = split_plane.plane.answer(request)
        assert answer is not None  # the short way stays open
        seen[answer.model_version] += 1
    for version, share in (("1", 0.7), ("2", 0.2), ("3", 0.1)):
        assert within(seen[version], 100_000, share), seen
        assert split_plane.of(version)["requests"] == split_plane.of(version)["answered"] == seen[version]
        assert split_plane.metric("headrace_traffic_requests_total", version=version) == seen[version]
    await split_plane.close()


@async_test
async def test_a_version_without_the_express_path_gets_its_share_too() -> None:
    split_plane = await open_split_plane(echo)
    await split_plane.load(2, echo, scheduling=DynamicBatching(max_queue_delay_microseconds=1))
    assert split_plane.versions[1].express is not None and split_plane.versions[2].express is None
    split_plane.split("1=0.8 2=0.2")
    seen = Counter([await split_plane.ask() for _ in range(10_000)])
    assert within(seen["2"], 10_000, 0.2), seen
    assert split_plane.of("1")["requests"] + split_plane.of("2")["requests"] == 10_000
    await split_plane.close()


@async_test
async def test_one_key_always_lands_on_one_version_whatever_the_way() -> None:
    split_plane = await open_split_plane(echo, echo)
    split_plane.split("1=0.5 2=0.5", sticky=StickyBy(field="user"))
    second = await open_split_plane(echo, echo, seed=99)
    second.split("1=50 2=50", sticky=StickyBy(field="user"))
    seen: Counter[str] = Counter()
    for number in range(300):
        key = f"user-{number}"
        long = await split_plane.begin(key).answer()
        versions = {
            long.model_version,  # type: ignore[union-attr]
            await split_plane.ask(key),
            await split_plane.ask(user=key),
            await split_plane.ask(sticky_key=key),
            await second.ask(key),
        }
        assert len(versions) == 1
        seen.update(versions)
    assert within(seen["1"], 300, 0.5)
    streamed = Streamed(split_plane.plane, "m", INPUT0=ONE)
    ((answer, final),) = await streamed.all()
    assert final and answer.model_version in "12"
    await split_plane.close()
    await second.close()


@async_test
async def test_when_weights_change_only_those_at_the_border_change_versions() -> None:
    split_plane = await open_split_plane(echo, echo, echo)
    keys = [f"k{number}" for number in range(2_000)]
    split_plane.split("1=0.9 2=0.1")
    before = {key: await split_plane.ask(key) for key in keys}
    split_plane.split("2=0.3 1=0.7")  # the order in which they are written does not matter
    after = {key: await split_plane.ask(key) for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert within(len(moved), 2_000, 0.2)
    assert {(before[key], after[key]) for key in moved} == {("1", "2")}
    await split_plane.close()


def test_keys_of_two_models_have_nothing_to_do_with_each_other() -> None:
    one, two = KeyHash("one"), KeyHash("two")
    both = sum(one.of(str(n)) < 0.5 and two.of(str(n)) < 0.5 for n in range(10_000))
    assert within(both, 10_000, 0.25)
    assert all(0 <= one.of(key) < 1 for key in ("", "é", "\udc80", "x" * 100_000))


def test_a_share_of_nothing_is_never_chosen_and_the_ends_belong_to_someone() -> None:
    points = iter([0.0, 0.3, math.nextafter(1, 0)])
    chooser: VersionChooser[str] = VersionChooser("m", lambda: next(points))
    chooser.set_choices([(0.0, "none"), (0.3, "first"), (0.7 - 1e-9, "last"), (0.0, "nobody")])
    chosen = []
    for _ in range(3):
        chosen.append(chooser.peek(""))
        assert chooser.peek("") == chosen[-1]  # not drawn again before it is taken
        chooser.take("")
    assert chosen == ["first", "last", "last"]


@async_test
async def test_a_request_with_a_version_is_not_split() -> None:
    split_plane = await open_split_plane(echo, echo)
    split_plane.split("1=1 2=0")
    answer = split_plane.plane.answer(InferRequest("m", split_plane.request().inputs, "2"))
    assert answer is not None and answer.model_version == "2"
    assert split_plane.of("2")["requests"] == 0
    with pytest.raises(NotFound):
        split_plane.plane.infer(InferRequest("m", split_plane.request().inputs, "9"), RecordingCaller())
    with pytest.raises(NotFound):
        split_plane.plane.infer_stream(InferRequest("m", split_plane.request().inputs, "9"), lambda *_: None)
    with pytest.raises(NotFound):
        split_plane.plane.infer_stream(InferRequest("nothing", split_plane.request().inputs), lambda *_: None)
    split_plane.traffic.remove("m")
    assert {await split_plane.ask() for _ in range(20)} == {"2"}
    assert split_plane.served.default is split_plane.served.newest
    await split_plane.close()


@async_test
async def test_labels_stand_for_versions() -> None:
    split_plane = SplitPlane()
    labels = {"parameters": {"version_labels": "1=v1.0.0, 2=v1.2.0"}}
    await split_plane.load(1, **labels)
    await split_plane.load(2, **labels)
    split_plane.split("v1.0.0=0 v1.2.0=1")
    assert {await split_plane.ask() for _ in range(20)} == {"2"}
    assert split_plane.of("v1.2.0")["number"] == "2"
    split_plane.split("1=1 v1.2.0=0")
    assert {await split_plane.ask() for _ in range(20)} == {"1"}
    await split_plane.close()


def sequence_model(split_plane: SplitPlane, number: int) -> Any:
    control = SequenceBatching()
    return split_plane.load(number, echo, **{**PLAIN, "scheduling": control})


@async_test
async def test_a_sequence_stays_with_the_version_it_began_at() -> None:
    split_plane = SplitPlane()
    await sequence_model(split_plane, 1)
    await sequence_model(split_plane, 2)
    split_plane.split("1=0.5 2=0.5")

    async def step(number: int, **flags: bool) -> str:
        answer = await split_plane.begin(sequence_id=number, **flags).answer()
        assert not isinstance(answer, BaseException), answer
        return answer.model_version

    began = {number: await step(number, sequence_start=True) for number in range(1, 41)}
    assert set(began.values()) == {"1", "2"}
    assert {number: await step(number) for number in began} == began
    # Whatever becomes of the shares.
    split_plane.split("1=0 2=1")
    assert {number: await step(number) for number in began} == began
    split_plane.traffic.roll_back("m", "1", "test")
    split_plane.split("2=1")
    assert {number: await step(number, sequence_end=True) for number in began} == began
    assert {await step(number, sequence_start=True, sequence_end=True) for number in began} == {"2"}
    await split_plane.close()


@async_test
async def test_many_concurrent_requests_are_all_answered_and_counted() -> None:
    split_plane = await open_split_plane(echo, echo, scheduling=DynamicBatching())
    split_plane.split("1=0.5 2=0.5")
    requests = [split_plane.begin() for _ in range(500)]
    answers = await asyncio.gather(*(request.answer() for request in requests))
    seen = Counter(answer.model_version for answer in answers)  # type: ignore[union-attr]
    assert seen.total() == 500
    assert {version: split_plane.of(version)["answered"] for version in "12"} == dict(seen)
    await split_plane.close()
