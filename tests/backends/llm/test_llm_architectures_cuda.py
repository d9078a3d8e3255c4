# SPDX-License-Identifier: Apache-2.0
"""Graphs of the architectures of `support.architectures` on a GPU, compared with transformers on the same GPU.

In float32 the greedy answers to seven prompts are transformers', token for token. In bfloat16 the logits are compared with
those of transformers in float32, and may be as far from them as transformers' own in bfloat16.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.backends.llm.engine_core import make_scheduler
from headrace.backends.llm.model_runner.model_loader import check_folder, load_model, open_runner
from headrace.backends.llm.scheduler import Sequence
from headrace.backends.llm.settings import LlmSettings
from support.architectures import Architecture, covered
from support.llm_steps import greedy_answers

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler, about precision; as errors they would end the compilation
]

NEW = 24
LENGTHS = (1, 2, 9, 17, 40, 70, 130)
PROMPTS = [[(7 * length + 3 * place * place) % 500 + 8 for place in range(length)] for length in LENGTHS]


def reference(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' own model; its own attention, since others leave out caps and sinks."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval().cuda()


def wanted(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    return list(made[0, len(prompt) :].tolist())


@contextmanager
def graphs_of(folder: Path, caplog: pytest.LogCaptureFixture, dtype: str, *, compiled: bool) -> Iterator[Any]:
    """A runner with graphs; fails if there are none, or if its layers are not compiled although they should be."""
    from headrace.backends.llm.model_runner.cuda_graphs import CudaGraphRunner

    device = torch.device("cuda", 0)
    settings = LlmSettings(
        folder, dtype=dtype, compile=compiled, page_size=8, kv_cache_bytes=1 << 24, max_running=8, max_step_tokens=64
    )
    runner, _ = open_runner(load_model(check_folder(settings), settings, device), settings, device)
    try:
        assert isinstance(runner, CudaGraphRunner), caplog.text
        assert "not compiled" not in caplog.text
        yield runner
    finally:
        runner.close()
        gc.collect()
        torch.cuda.empty_cache()


def logits_along(runner: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return the logits after a prompt and after each token of an answer but the last, whatever the model would say."""
    scheduler = make_scheduler(runner, max_running=8, max_step_tokens=64, prefix_cache=False)
    sequence = Sequence(list(prompt), len(prompt) + len(answer))
    scheduler.add(sequence)
    rows: list[torch.Tensor] = []
    while not scheduler.idle:
        plan = scheduler.schedule()
        step = runner.launch(plan, greedy=False)
        step.wait()
        sampling = sum(chunk.samples for chunk in plan)
        if sampling:
            rows.append(step.logits[0].clone())
        scheduler.commit(plan, [answer[len(rows) - 1]] * sampling)
        if len(sequence.tokens) == sequence.limit:
            scheduler.finish([sequence])
    return torch.stack(rows)


@torch.inference_mode()
def reference_logits(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + answer], device="cuda")
    logits: torch.Tensor = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the median over rows of the mean difference, relative to the mean logit.

    A row for which rounding chooses another expert is far off, for transformers too, and has no say.
    """
    differences = (found - exact).abs().mean(1) / exact.abs().mean(1)
    return float(differences.median())


@pytest.mark.parametrize("architecture", covered("captured", on_gpu=True))
def test_graphs_answer_as_transformers_does(
    architecture: Architecture, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compare_answers(architecture, tmp_path, caplog, compiled=False)


@pytest.mark.parametrize("architecture", covered("compiled", on_gpu=True))
def test_compiled_graphs_answer_as_transformers_does(
    architecture: Architecture, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compare_answers(architecture, tmp_path, caplog, compiled=True)


def compare_answers(
    architecture: Architecture, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, compiled: bool
) -> None:
    folder = architecture.make(tmp_path / "model")
    model = reference(folder, torch.float32)
    expected = [wanted(model, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    with graphs_of(folder, caplog, "float32", compiled=compiled) as runner:
        assert greedy_answers(runner, PROMPTS, NEW, max_running=8) == expected


@pytest.mark.parametrize("compiled", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("architecture", covered("captured", on_gpu=True))
def test_bfloat16_is_as_near_to_float32_as_transformers(
    architecture: Architecture, compiled: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = architecture.make(tmp_path / "model")
    model = reference(folder, torch.float32)
    answers = [wanted(model, prompt) for prompt in PROMPTS]
    exact = torch.cat([reference_logits(model, *pair) for pair in zip(PROMPTS, answers, strict=True)])
    del model
    rounded = reference(folder, torch.bfloat16)
    theirs = torch.cat([reference_logits(rounded, *pair) for pair in zip(PROMPTS, answers, strict=True)])
    del rounded
    with graphs_of(folder, caplog, "bfloat16", compiled=compiled) as runner:
        ours = torch.cat([logits_along(runner, *pair) for pair in zip(PROMPTS, answers, strict=True)])
    assert ours.isfinite().all()
    found, allowed = distance(ours, exact), distance(theirs, exact)
    print(f"{architecture.name}: logits in bfloat16 are {found:.2%} off, transformers' {allowed:.2%}")
    assert found < 1.5 * allowed + 0.002
