# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on a GPU: drafts are verified in captured steps, and answers are those without drafts."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_instances import Caller, Served, Services
from llm_scheduling import Guess

from headrace.backends.contract import ModelFiles, Placement
from headrace.backends.llm.backend import LlmBackend
from headrace.backends.llm.scheduler import Sequence
from headrace.backends.llm.speculation import draft_loader
from headrace.backends.llm.speculation.draft_model import DraftModel
from headrace.core.generation import Generation, Sampling
from headrace.models.config.types import ModelConfig, OutputSpec
from support import llm_models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

PROMPTS = [("the quick brown fox jumps over Grüße " * 3)[number % 20 : 3 + 5 * number] for number in range(24)]
GREEDY = Sampling(temperature=0.0, max_tokens=48, ignore_eos=True)
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=1.0, max_tokens=40, seed=1, ignore_eos=True),
    GREEDY,
    Sampling(temperature=0.7, top_p=0.9, max_tokens=30, seed=2, min_tokens=4),
    Sampling(temperature=0.8, top_k=20, max_tokens=40, seed=3, logit_bias={7: 2.0}),
]
LOGPROBS = [
    Sampling(temperature=0.0, max_tokens=30, logprobs=2),
    Sampling(temperature=0.8, max_tokens=30, logprobs=0, seed=8),
    Sampling(temperature=0.0, max_tokens=20, repetition_penalty=1.3),
]


class Known(Guess):
    """Drafts the answers that were heard without drafts, with a wrong token now and then."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__()
        self.answers = answers

    def waits(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) % 3 > 0

    def draft(self, wanted: list[tuple[Sequence, int]], room: int) -> list[list[int]]:
        drafts = []
        for sequence, most in wanted:
            length, known = sequence.prompt_length, len(sequence.tokens)
            rest = self.answers[tuple(sequence.tokens[:length])][known - length :][: min(most, 1 + known % 7)]
            drafts.append([token if (known + i) % 6 else (token + 1) % 500 for i, token in enumerate(rest)])
        return drafts


async def answered(
    folder: Path, samplings: list[Sampling], drafter: Guess | None = None, **parameters: str
) -> tuple[list[str], dict[tuple[int, ...], list[int]], Served]:
    """All answers, by text and by token, and the instance, which is closed."""
    services = Services()
    config = ModelConfig(
        "tiny",
        "llm",
        outputs=(OutputSpec("text_output", None, None),),
        decoupled=True,
        parameters={
            "kv_cache_bytes": str(1 << 26),
            "max_running": "12",
            "dtype": "float32",
            "compile": "false",
            **parameters,
        },
    )
    model: Any = LlmBackend().load(config, ModelFiles(folder.parent, 1, folder), services)  # type: ignore[arg-type]
    instance: Any = await asyncio.to_thread(model.open, Placement("tiny_0_gpu0", "gpu", 0))
    tiny, tokens = Served(model, instance, services.metrics), {}
    scheduler = tiny.engine.scheduler
    assert type(tiny.engine.runner).__name__ == "CudaGraphRunner", "the log says why there are no graphs"
    if drafter is not None:
        scheduler.drafter, scheduler.max_draft_rows = drafter, 64
    finish = scheduler.finish

    def finished(sequences: Any) -> None:
        for sequence in (given := list(sequences)):
            length = sequence.prompt_length
            tokens[tuple(sequence.tokens[:length])] = sequence.tokens[length:]
        finish(given)

    scheduler.finish = finished  # type: ignore[method-assign]
    try:
        callers: list[Caller] = []
        for number, prompt in enumerate(PROMPTS):
            sampling = samplings[number % len(samplings)]
            callers.append(tiny.begin(Generation(prompt=prompt, sampling=sampling, stream=number % 2 > 0)))
        for caller in callers:
            await asyncio.wait_for(caller.ended.wait(), 120)
            assert caller.error is None
        assert scheduler.pool.used == 0
    finally:
        await asyncio.to_thread(instance.close)
        model.close()
        gc.collect()
    return [caller.text for caller in callers], tokens, tiny


def check_same(drafted: list[str], texts: list[str], samplings: list[Sampling]) -> None:
    """Check that answers are equal, but for one sampled answer: rounding moves a border of its distribution.

    It was seen at a token whose random number is 3e-7 from a border; steps of other sizes round differently.
    """
    differing = [number for number, (one, other) in enumerate(zip(drafted, texts, strict=True)) if one != other]
    assert len(differing) <= 1
    assert all(samplings[number % len(samplings)].temperature for number in differing), "greedy answers are equal"


@pytest.mark.parametrize("samplings", [SAMPLINGS, LOGPROBS, [*SAMPLINGS, *LOGPROBS]], ids=["ahead", "read", "both"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_answers_are_those_without_drafts(kind: str, samplings: list[Sampling], tmp_path: Path) -> None:
    """In float32, whose rounding moves no greedy token of these models."""
    folder = getattr(llm_models, f"tiny_{kind}")(tmp_path / "1")
    # Room for 64 rows also without drafts, so that both compute with the same graphs.
    usual = {"speculation": "ngram", "prompt_lookup_min": "60", "prompt_lookup_max": "60"}
    texts, tokens, without = asyncio.run(answered(folder, samplings, **usual))
    assert without.engine.scheduler.drafts == 0
    drafter = Known(tokens)
    drafted, _, tiny = asyncio.run(answered(folder, samplings, drafter, **usual))
    check_same(drafted, texts, samplings)
    assert drafter.accepted > 100 < drafter.rejected + drafter.accepted
    assert drafter.rejected > 20
    assert sum(tiny.engine.scheduler.accepted_tokens) == drafter.accepted


def test_ngrams_save_steps_where_a_model_repeats_itself(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "1", initializer_range=0.05)
    long = [Sampling(temperature=0.0, max_tokens=150, ignore_eos=True)]
    texts, _, without = asyncio.run(answered(folder, long))
    drafted, _, tiny = asyncio.run(answered(folder, long, speculation="ngram", compile="true"))
    assert drafted == texts
    assert tiny.value("headrace_llm_steps_total") < 0.8 * without.value("headrace_llm_steps_total")
    assert sum(tiny.engine.scheduler.accepted_tokens) > 0.5 * tiny.engine.scheduler.draft_tokens


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_draft_model_drafts_in_captured_steps(noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model, which is always right about greedy answers, and one with noise in its weights."""
    from safetensors.torch import load_file, save_file

    times = iter([1, 100])  # of the draft model, and of the other one, which is as large
    monkeypatch.setattr(draft_loader, "_step_time", lambda model, device: next(times))
    folder = llm_models.tiny_llama(tmp_path / "1")
    draft = llm_models.tiny_llama(tmp_path / "draft")
    torch.manual_seed(2)
    weights = load_file(draft / "model.safetensors")
    noisy = {name: tensor + noise * torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(noisy, draft / "model.safetensors", metadata={"format": "pt"})
    texts, _, _ = asyncio.run(answered(folder, SAMPLINGS))
    drafted, _, tiny = asyncio.run(answered(folder, SAMPLINGS, speculation="draft", draft_model=str(draft)))
    check_same(drafted, texts, SAMPLINGS)
    scheduler = tiny.engine.scheduler
    accepted, tokens = sum(scheduler.accepted_tokens), scheduler.draft_tokens
    assert tokens >= accepted > 20
    if noise == 0.0:
        assert accepted > 0.3 * tokens
    drafter = scheduler.drafter
    assert isinstance(drafter, DraftModel) and drafter._pool.used == 0 and not drafter._failed


def test_few_sequences_may_run_and_there_is_room_for_drafts(tmp_path: Path) -> None:
    """The captured steps have rows for drafts even where only one sequence runs."""
    folder = llm_models.tiny_llama(tmp_path / "1", initializer_range=0.05)
    texts, _, _ = asyncio.run(answered(folder, [GREEDY], max_running="1"))
    drafted, _, tiny = asyncio.run(answered(folder, [GREEDY], max_running="1", speculation="ngram"))
    assert drafted == texts
    assert len(tiny.engine.scheduler.accepted_tokens) == 7
