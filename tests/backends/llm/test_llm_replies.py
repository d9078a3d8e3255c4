# SPDX-License-Identifier: Apache-2.0
"""Replies of several steps, when the event loop was behind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from llm_instances import runs, served

from headrace.backends.llm.request_state import merge_replies
from headrace.core.errors import Internal
from headrace.core.generation import Generation, Sampling

FIRST, SECOND = {"index": 0}, {"index": 1}


def merged(*steps: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return merge_replies(list(steps))  # type: ignore[arg-type, return-value]


def test_texts_of_a_choice_become_one_reply_in_order() -> None:
    steps = [
        [("A", "one ", False, FIRST), ("B", "x", False, FIRST)],
        [("B", "y", False, FIRST), ("A", "two", False, FIRST)],
    ]
    assert merged(*steps) == [("A", "one two", False, FIRST), ("B", "xy", False, FIRST)]


def test_choices_of_one_request_stay_apart() -> None:
    steps = [[("A", "one", False, FIRST), ("A", "eins", False, SECOND)], [("A", "!", False, SECOND)]]
    assert merged(*steps) == [("A", "one", False, FIRST), ("A", "eins!", False, SECOND)]


def test_a_text_is_not_moved_past_a_reply_with_more_than_text() -> None:
    logprobs = {"index": 0, "logprobs": "[]"}
    steps = [
        [("A", "a", False, FIRST)],
        [("A", "b", False, logprobs)],
        [("A", "c", False, FIRST), ("A", "d", True, FIRST)],
    ]
    assert merged(*steps) == [reply for step in steps for reply in step]


def test_an_error_and_an_end_are_replies_of_their_own() -> None:
    error = Internal("broken")
    steps = [[("A", "a", False, FIRST), ("B", None, True, {})], [("A", "b", False, FIRST)], [("A", error, True, {})]]
    assert merged(*steps) == [("A", "ab", False, FIRST), ("B", None, True, {}), ("A", error, True, {})]


@runs
async def test_a_loop_that_is_behind_gets_the_whole_text_in_fewer_replies() -> None:
    sampling = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
    generation = Generation("the quick brown fox", sampling=sampling, stream=True)
    async with served() as tiny:
        usual = await tiny.ask(generation)
        delayed = tiny.begin(generation)
        await delayed.came.wait()
        before = len(delayed.answers)
        deadline = time.monotonic() + 60
        while tiny.engine._requests and time.monotonic() < deadline:
            time.sleep(0.001)  # the loop is blocked until the engine has made everything
        await asyncio.wait_for(delayed.ended.wait(), 60)
        assert delayed.text == usual.text
        assert delayed.last["completion_tokens"] == 24
        assert len(delayed.answers) <= before + 2  # all texts, and the end
