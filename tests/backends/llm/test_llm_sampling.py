# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_tokenizers import tokenizer

from headrace.backends.llm.request_state import logprobs_json
from headrace.backends.llm.sampling.bad_words import BadWords, tokenize_bad_words
from headrace.backends.llm.sampling.logits_processors import _top_p, _top_p_from_candidates, warp
from headrace.backends.llm.sampling.prompt_logprobs import PromptLogprobs
from headrace.backends.llm.sampling.sampler import Sampler, TokenLogprobs, _pick, draw_tokens
from headrace.backends.llm.sampling.state import SamplingState
from headrace.core.generation import Sampling

WIDTH = 700


def _logits(rows: int, seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def _row(
    prompt: list[int] | None = None, eos: frozenset[int] = frozenset({2}), index: int = 0, **fields: Any
) -> SamplingState:
    return SamplingState(Sampling(**fields), prompt or [], None, eos, index)


def _sample(logits: torch.Tensor, *rows: SamplingState) -> list[int]:
    before = logits.clone()
    tokens = Sampler(logits.shape[1], "cpu").sample(logits, rows).tokens
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True, msg="the logits were changed")
    return tokens


def _hugging_face(scores: torch.Tensor, sampling: Sampling, ids: list[int]) -> torch.Tensor:
    """One row through transformers' own, in the order of its `generate`."""
    from transformers.generation import logits_process as theirs

    steps: list[Any] = []
    if sampling.repetition_penalty != 1.0:
        steps.append(theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature != 1.0:
        steps.append(theirs.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(theirs.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        steps.append(theirs.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        steps.append(theirs.MinPLogitsWarper(sampling.min_p))
    for step in steps:
        scores = step(torch.tensor([ids]), scores)
    return scores


THE_SAME_EACH_TIME = settings(max_examples=60, deadline=None, derandomize=True)
"""Single precision is added up in different orders here: of numbers drawn anew each time, some would lie between the two."""

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 50, 600, 10_000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
)


@given(st.lists(SAMPLINGS, min_size=1, max_size=4), st.integers(0, 1000))
@THE_SAME_EACH_TIME
def test_what_may_be_drawn_is_what_transformers_leaves(samplings: list[Sampling], seed: int) -> None:
    logits = _logits(len(samplings), seed)
    prompts = [[seed % WIDTH, 3, 3, place] for place in range(len(samplings))]
    rows = [SamplingState(sampling, prompt) for sampling, prompt in zip(samplings, prompts, strict=True)]
    scores = Sampler(WIDTH, "cpu").processors.bias(logits, rows)
    numbers = np.asarray([(0, s.temperature, s.top_k, s.top_p, s.min_p) for s in samplings], np.float64)
    ours = warp(scores, numbers, torch.from_numpy(numbers))
    for place, sampling in enumerate(samplings):
        expected = _hugging_face(logits[place : place + 1], sampling, prompts[place])[0]
        torch.testing.assert_close(ours[place], expected, rtol=1e-6, atol=1e-6)


@given(
    st.lists(st.sampled_from([0.05, 0.5, 0.9, 0.9999, 1.0]), min_size=1, max_size=5),
    st.integers(0, 1000),
    st.booleans(),
)
@THE_SAME_EACH_TIME
def test_the_cpus_way_to_top_p_is_the_same(tops: list[float], seed: int, flat: bool) -> None:
    scores = _logits(len(tops), seed) * (0.01 if flat else 1.0)
    removed = torch.tensor([[1.0 - top_p] for top_p in tops])
    torch.testing.assert_close(_top_p_from_candidates(scores, removed, (16, 300)), _top_p(scores, removed))


@given(st.lists(SAMPLINGS, min_size=1, max_size=4), st.integers(0, 1000), st.sampled_from([0.02, 0.3, 1.0, 4.0]))
@THE_SAME_EACH_TIME
def test_the_likeliest_alone_give_what_all_would_give(samplings: list[Sampling], seed: int, width: float) -> None:
    scores = _logits(len(samplings), seed) * width
    scores[0, 40:] = -math.inf if seed % 3 == 0 else scores[0, 40:]
    uniform = np.random.default_rng(seed).random(len(samplings))
    numbers = np.asarray(
        [(u, s.temperature, s.top_k, s.top_p, s.min_p) for u, s in zip(uniform, samplings, strict=True)], np.float64
    )
    moved = torch.from_numpy(numbers)
    assert draw_tokens(scores, numbers, moved).tolist() == _pick(warp(scores, numbers, moved), moved[:, :1]).tolist()


def test_greedy_rows_take_the_likeliest_alone_and_among_others() -> None:
    logits = _logits(3)
    expected = logits.argmax(-1).tolist()
    rows = [_row(temperature=0.0), _row(temperature=1.0, seed=5), _row(temperature=0.0, logprobs=2)]
    assert Sampler.all_argmax_only(rows[:1]) and not Sampler.all_argmax_only(rows)
    mixed = _sample(logits, *rows)
    assert [mixed[0], mixed[2]] == [expected[0], expected[2]]
    assert _sample(logits[:1], rows[0]) == expected[:1]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.0, "presence_penalty": 0.1},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 0.0, "logit_bias": {1: 1.0}},
        {"temperature": 0.0, "min_tokens": 1},
        {"temperature": 0.0, "allowed_token_ids": (3, 70)},
    ],
)
def test_a_row_with_extra_sampling_options_is_not_plain(fields: dict[str, Any]) -> None:
    assert not _row(**fields).argmax_only
    assert _row(temperature=0.0, top_p=0.5, top_k=3, seed=1).argmax_only


def test_bad_words_forbid_their_last_token_behind_the_others() -> None:
    spellings = {"ab": [1, 2], " ab": [9, 1, 2], "c": [3], " c": [4], "d": [5], " d": [6, 7], "": []}
    words = tokenize_bad_words([" ab", "c", "d"], lambda text: spellings[text])
    assert words == ((1, 2), (3,), (4,), (5,), (6, 7)), "where the space is a token of its own there is one spelling"
    row = SamplingState(Sampling(temperature=0.0), [1], None, bad_words=BadWords(words))
    assert not row.argmax_only and not row.can_run_ahead and not row.unprocessed
    logits = torch.arange(0.0, -WIDTH, -1.0).expand(1, -1).clone()
    logits[0, :8] = torch.tensor([0.0, 9, 10, 11, 12, 13, 1, 14])
    taken = []
    for _ in range(3):
        taken += _sample(logits, row)
        row.advance(taken[-1])
    assert taken == [7, 7, 7]
    row.advance(1)
    assert row.forbidden_tokens() == {2, 3, 4, 5}
    row.advance(2)
    assert row.forbidden_tokens() == {3, 4, 5}
    row.advance(6)
    assert row.forbidden_tokens() == {3, 4, 5, 7}
    single = SamplingState(Sampling(), [], None, bad_words=BadWords(((3,),)))
    assert single.can_run_ahead and not single.unprocessed and single.forbidden_tokens() == {3}


@pytest.mark.parametrize("tokens", [(3,), (3, 31, 32, WIDTH - 1), tuple(range(0, WIDTH, 7))])
def test_only_allowed_tokens_are_drawn(tokens: tuple[int, ...]) -> None:
    logits = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    rows = [_row(allowed_token_ids=tokens, seed=1), _row(seed=1)]
    drawn = {_sample(logits, *rows)[0] for _ in range(50) if rows[0].advance(0) is None}
    assert drawn <= set(tokens)
    assert rows[0].can_run_ahead and not rows[0].unprocessed


def test_the_logprobs_of_a_prompt_are_those_of_its_chunks_in_any_order() -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2]
    logits = torch.randn(len(prompt), WIDTH, generator=torch.Generator().manual_seed(2))
    words = tokenizer("bytes")
    texts = set()
    for cuts in ((0, 7), (0, 3, 7), (0, 1, 6, 7)):
        collected = PromptLogprobs(prompt, 2)
        chunks = list(zip(cuts, cuts[1:], strict=False))
        for start, end in [*reversed(chunks), chunks[0]]:
            if rows := collected.rows_of(start, end):
                collected.add(start, logits[start : start + rows])
        texts.add(collected.to_json(words))
    assert len(texts) == 1
    first, *others = json.loads(texts.pop())
    assert (first["token_id"], first["logprob"], first["top_logprobs"]) == (3, None, [])
    expected = logits.log_softmax(-1)
    for index, entry in enumerate(others):
        row = expected[index]
        assert entry["token_id"] == prompt[index + 1]
        assert entry["logprob"] == pytest.approx(float(row[prompt[index + 1]]))
        assert entry["rank"] == int((row > row[prompt[index + 1]]).sum()) + 1
        assert [top["token_id"] for top in entry["top_logprobs"]] == row.topk(2).indices.tolist()
    assert PromptLogprobs([1], 3).rows_of(0, 1) == 0


def test_min_tokens_end_and_the_row_is_plain_again() -> None:
    row = _row(temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    logits = torch.zeros(1, WIDTH)
    logits[0, 2], logits[0, 7], logits[0, 9] = 9.0, 8.0, 7.0
    taken = []
    for _ in range(3):
        taken += _sample(logits, row)
        row.advance(taken[-1])
    assert taken == [9, 9, 2] and row.argmax_only
    assert row.is_stop_token(2) and row.is_stop_token(7) and not row.is_stop_token(9)
    assert not _row(ignore_eos=True).is_stop_token(2)


def test_the_same_seed_gives_the_same_tokens_in_any_company() -> None:
    def said(*others: SamplingState, place: int = 0) -> list[int]:
        row, tokens = _row(seed=1234, temperature=0.9, top_p=0.95, index=1), []
        for step in range(20):
            rows = [*others[:place], row, *others[place:]]
            logits = torch.cat([_logits(1, 100 + step) if r is row else _logits(1, 7) for r in rows])
            tokens.append(_sample(logits, *rows)[place])
            row.advance(tokens[-1])
        return tokens

    alone = said()
    assert len(set(alone)) > 5
    assert said(_row(), _row(temperature=0.0), place=1) == alone
    assert said(_row(seed=1234, top_k=4), _row(repetition_penalty=1.5, prompt=[1]), _row(logprobs=5), place=3) == alone


def test_choices_and_seeds_differ() -> None:
    logits = _logits(1)

    def said(row: SamplingState) -> list[int]:
        tokens = []
        for _ in range(12):
            tokens += _sample(logits, row)
            row.advance(tokens[-1])
        return tokens

    told = [said(_row(seed=5)), said(_row(seed=5, index=1)), said(_row(seed=6)), said(_row()), said(_row())]
    assert len(set(map(tuple, told))) == 5
    assert said(_row(seed=5)) == told[0]


def test_a_draw_that_was_in_vain_changes_nothing_and_one_ahead_is_the_next() -> None:
    logits, sampler = _logits(1), Sampler(WIDTH, "cpu")
    row, second = _row(seed=9), _row(seed=9)
    first = _sample(logits, row)
    assert _sample(logits, row) == first
    row.in_flight = 1
    ahead = sampler.start(logits, [row]).tokens.tolist()
    row.in_flight = 0
    row.advance(first[0])
    second.advance(first[0])
    assert _sample(logits, second) == ahead
    assert row.can_run_ahead and not _row(frequency_penalty=1.0).can_run_ahead and not _row(logprobs=1).can_run_ahead


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.6}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(fields: dict[str, Any]) -> None:
    width, draws = 40, 20_000
    logits = _logits(1, 3, width) / 2
    expected = _hugging_face(logits, Sampling(**fields), [0]).softmax(-1)[0].double()
    rows = [_row(seed=seed, **fields) for seed in range(draws)]
    counts = torch.bincount(torch.tensor(_sample(logits.expand(draws, width), *rows)), minlength=width)
    likely = expected * draws >= 5
    assert counts[expected == 0].sum() == 0
    rare = counts[~likely].sum().item(), (expected[~likely].sum() * draws).item()
    square = ((counts[likely] - expected[likely] * draws) ** 2 / (expected[likely] * draws)).sum().item()
    assert abs(rare[0] - rare[1]) <= 5 * math.sqrt(rare[1] + 1)
    freedom = int(likely.sum()) - 1
    # Five standard deviations of the chi-square; the seeds are fixed, so this passes always or never.
    assert square < freedom + 5 * math.sqrt(2 * freedom)


def test_steps_of_one_seed_are_independent_of_each_other() -> None:
    row = _row(seed=77)
    numbers = []
    for _ in range(4000):
        numbers.append(row.uniform())
        row.advance(0)
    assert abs(np.mean(numbers) - 0.5) < 0.02
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
    assert min(numbers) >= 0.0 and max(numbers) < 1.0


def test_presence_and_frequency_count_the_output_not_the_prompt() -> None:
    row = _row(prompt=[1, 1, 1], temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    for token in [4, 4, 6]:
        row.advance(token)
    scores = Sampler(WIDTH, "cpu").processors.bias(torch.zeros(1, WIDTH), [row])[0]
    assert {place: value for place, value in enumerate(scores.tolist()) if value} == {4: -1.0, 6: -0.75}


def test_repetition_counts_prompt_and_answer_once() -> None:
    row = _row(prompt=[1, 1, 3], temperature=0.0, repetition_penalty=2.0)
    for token in [5] * 200 + list(range(100, 300)):
        row.advance(token)
    logits = torch.ones(1, WIDTH)
    logits[0, 3] = -1.0
    scores = Sampler(WIDTH, "cpu").processors.bias(logits, [row])[0]
    assert scores[[1, 3, 5, 6, 100, 299, 300]].tolist() == [0.5, -2.0, 0.5, 1.0, 0.5, 0.5, 1.0]


def test_penalties_of_one_row_leave_others_alone() -> None:
    rows = [_row(temperature=0.0), _row(prompt=[3], temperature=0.0, repetition_penalty=2.0), _row(temperature=0.0)]
    logits = torch.zeros(3, WIDTH)
    logits[:, 3], logits[:, 8] = 2.0, 1.5
    assert _sample(logits, *rows) == [3, 8, 3]


def test_logit_bias_adds() -> None:
    logits = torch.zeros(2, WIDTH)
    logits[:, 5] = 1.0
    assert _sample(logits, _row(temperature=0.0, logit_bias={5: -100.0, 9: 100.0}), _row(temperature=0.0)) == [9, 5]
    assert Counter(_sample(logits, _row(logit_bias={9: 100.0}), _row(logit_bias={11: 100.0}))) == Counter([9, 11])


def test_logprobs_are_the_models_own() -> None:
    logits = _logits(4)
    expected = logits.log_softmax(-1)
    rows = [
        _row(seed=1, logprobs=3, temperature=0.2, top_k=5, logit_bias={7: 50.0}),
        _row(temperature=0.0),
        _row(temperature=0.0, logprobs=0),
        _row(seed=2, logprobs=20),
    ]
    sampled = Sampler(WIDTH, "cpu").sample(logits, rows)
    assert sampled.tokens[0] == 7 and sampled.logprobs[1] is None
    for place, count in ((0, 3), (2, 0), (3, 20)):
        logprobs = sampled.logprobs[place]
        assert logprobs is not None and len(logprobs.top) == count
        assert logprobs.logprob == pytest.approx(expected[place, sampled.tokens[place]].item(), abs=1e-5)
        values, ids = expected[place].topk(count)
        assert [token for token, _ in logprobs.top] == ids.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_as_json() -> None:
    words = tokenizer("bytes")
    sea = words.encode("the", add_special=False)[0]
    half = words.encode("🚧", add_special=False)[0]
    told = TokenLogprobs(-0.5, [(half, -math.inf)])
    text = logprobs_json(words, [sea, sea], [told, None])
    import json

    entries = json.loads(text)
    assert len(entries) == 1
    assert entries[0]["token"].encode() == bytes(entries[0]["bytes"]) == words.token_bytes(sea)
    assert entries[0]["logprob"] == -0.5
    other = entries[0]["top_logprobs"][0]
    assert other["logprob"] == -9999.0 and bytes(other["bytes"]) == words.token_bytes(half)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_of_nan_give_some_token(value: float) -> None:
    logits = torch.full((2, WIDTH), value)
    tokens = _sample(
        logits, _row(seed=1, top_p=0.5, logprobs=1), _row(temperature=0.0, repetition_penalty=2.0, prompt=[1])
    )
    assert all(0 <= token < WIDTH for token in tokens)


def test_half_precision_logits_are_sampled_in_single_precision() -> None:
    logits = _logits(1).bfloat16()
    assert _sample(logits, _row(seed=3)) == _sample(logits.float(), _row(seed=3))
