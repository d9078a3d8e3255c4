# SPDX-License-Identifier: Apache-2.0
"""Replies of several steps, when the event loop was behind."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from llm_instances import runs, served

from headrace.backends.llm.request_state import merge_replies
from headrace.core.errors import FailedPrecondition, Internal, InvalidArgument
from headrace.core.generation import GeneratedTokens, Generation, Sampling

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


def generated(caller: Any) -> tuple[GeneratedTokens, ...]:
    """What a caller's answers were made of."""
    return tuple(
        GeneratedTokens(
            parameters["index"],
            tuple(map(int, parameters["token_ids"].split(","))),
            parameters.get("cached_tokens") if "tokenizer" in parameters else None,
            parameters.get("logprobs"),
        )
        for _, parameters in caller.answers
    )


TRACKED = Generation(
    "the quick brown fox",
    sampling=Sampling(max_tokens=12, temperature=1.0, seed=5, n=2, logprobs=1, presence_penalty=0.5, ignore_eos=True),
    stream=True,
    tracks_tokens=True,
)


def test_the_tokens_of_merged_replies_are_joined() -> None:
    steps = [
        [("A", "a", False, {"index": 0, "token_ids": "1,2"})],
        [("A", "b", False, {"index": 0, "token_ids": "3"})],
        [("A", "c", False, {"index": 0, "token_ids": "4", "replayed": True})],
    ]
    assert merged(*steps) == [("A", "ab", False, {"index": 0, "token_ids": "1,2,3"}), *steps[2]]


@runs
async def test_a_request_goes_on_from_the_tokens_of_another_server() -> None:
    async with served() as tiny:
        whole = await tiny.ask(TRACKED)
        replies = generated(whole)
        tokenizer = whole.answers[0][1]["tokenizer"]
        for count in (1, 5, len(replies) - 1, len(replies)):
            second = await tiny.ask(replace(TRACKED, continued=replies[:count], continued_tokenizer=tokenizer))
            assert second.texts() == whole.texts()
            assert [parameters.get("replayed", False) for _, parameters in second.answers].count(True) == count
            assert second.answers[:count] == [
                (text, {**given, "replayed": True}) for text, given in whole.answers[:count]
            ]
            ends = [parameters for _, parameters in second.answers if "finish_reason" in parameters]
            assert [(end["finish_reason"], end["completion_tokens"]) for end in ends] == [("length", 12)] * 2
            assert [token for reply in generated(second) if not reply.index for token in reply.tokens] == [
                token for reply in replies if not reply.index for token in reply.tokens
            ]


@runs
async def test_tokens_that_do_not_fit_are_refused() -> None:
    async with served() as tiny:
        whole = await tiny.ask(TRACKED)
        replies, tokenizer = generated(whole), whole.answers[0][1]["tokenizer"]
        beyond = (*(reply for reply in replies if not reply.index), GeneratedTokens(0, (1,)))
        for continued, given, error in (
            (replies, "another", FailedPrecondition),
            ((GeneratedTokens(2, (1,)),), tokenizer, InvalidArgument),
            ((GeneratedTokens(0, (1 << 30,)),), tokenizer, InvalidArgument),
            (beyond, tokenizer, InvalidArgument),
        ):
            with pytest.raises(error):
                await tiny.ask(replace(TRACKED, continued=continued, continued_tokenizer=given))
