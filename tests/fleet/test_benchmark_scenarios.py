# SPDX-License-Identifier: Apache-2.0
"""Traffic scenarios: what they mean, and what is refused with words that help."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidArgument
from headrace.fleet.benchmarks.scenarios import DEFAULTS, TASKS, RequestSizes, parse_scenario

TEXT = "text-to-text"


def drawn(said: str, task: str = TEXT, count: int = 300) -> list[RequestSizes]:
    chance, scenario = random.Random(1), parse_scenario(said, task)
    return [scenario.draw(chance) for _ in range(count)]


def test_what_they_mean() -> None:
    assert set(drawn("D(100, 7)")) == {RequestSizes(100, 7)}
    even = drawn("U(50,60)/(2,4)")
    assert {item.prompt_tokens for item in even} == set(range(50, 61))
    assert {item.answer_tokens for item in even} == {2, 3, 4}
    assert {item.prompt_tokens for item in drawn("U(3,9)")} == {1, 2, 3}
    normal = [item.prompt_tokens for item in drawn("N(480,240)/(300,150)", count=2000)]
    assert min(normal) >= 1 and 450 < sum(normal) / len(normal) < 510
    assert drawn("E(128)", "text-to-embeddings")[0] == RequestSizes(128, 0)
    assert drawn("I(512,256,2)", "image-to-text")[0] == RequestSizes(0, 100, 512, 256, 2)
    assert drawn("I(512,256)", "image-to-embeddings")[0].pictures == 1


@pytest.mark.parametrize(
    ("said", "task", "fix"),
    [
        ("D(100)", TEXT, r"D\(100,100\)"),
        ("N(480,240)", TEXT, r"N\(480,240\)/\(300,150\)"),
        ("D(0,5)", TEXT, "from 1"),
        ("U(9,5)/(1,2)", TEXT, "the minimum is above the maximum"),
        ("E(64)", TEXT, "not for text-to-text: write D"),
        ("D(1,1)", "text-to-embeddings", r"E\(128\)"),
        ("I(0,9)", "image-to-text", "from 1 to 8192"),
        ("D(1,99999999999)", TEXT, "from 1"),
        ("D(1,,2)", TEXT, "invalid numbers"),
        ("", TEXT, "is invalid"),
    ],
)
def test_what_is_refused(said: str, task: str, fix: str) -> None:
    with pytest.raises(InvalidArgument, match=fix):
        parse_scenario(said, task)


def test_those_of_a_task_are_for_it() -> None:
    for task in TASKS:
        assert [parse_scenario(scenario, task).text for scenario in DEFAULTS[task]] == list(DEFAULTS[task])


@given(st.text("DNUEI0123456789,()/ -", max_size=30), st.sampled_from(TASKS))
def test_anything_is_a_scenario_or_refused(said: str, task: str) -> None:
    try:
        scenario = parse_scenario(said, task)
    except InvalidArgument:
        return
    sizes = scenario.draw(random.Random(1))
    assert sizes.prompt_tokens >= 1 or sizes.pictures >= 1
