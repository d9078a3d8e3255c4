# SPDX-License-Identifier: Apache-2.0
"""`deterministic`: logits and tokens are the same, bit for bit, whatever other requests run.

Steps without graphs on a CPU. `test_llm_cuda_graphs.py` has the steps of graphs, `test_llm_deterministic_cuda.py` a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.contract import ModelFiles
from headrace.backends.llm.engine_core import make_scheduler
from headrace.backends.llm.model_runner import runner as runner_module
from headrace.backends.llm.model_runner.fixed_rows import blocks_of
from headrace.backends.llm.model_runner.model_loader import check_folder, load_model, open_runner
from headrace.backends.llm.model_runner.runner import ModelRunner
from headrace.backends.llm.sampling.sampler import Sampler, SamplerOutput
from headrace.backends.llm.sampling.state import SamplingState
from headrace.backends.llm.scheduler import Chunk, Sequence
from headrace.backends.llm.settings import LlmSettings, read_settings
from headrace.core.errors import InvalidArgument
from headrace.core.generation import Sampling
from headrace.models.config.types import ModelConfig
from support.architectures import Architecture, covered
from support.llm_models import tiny_llama, tiny_mixtral
from support.llm_steps import answer_logits, check_company

CPU = torch.device("cpu")


@contextmanager
def runner_of(folder: Path, **more: Any) -> Iterator[ModelRunner]:
    settings = LlmSettings(folder, page_size=8, kv_cache_bytes=1 << 22, deterministic=True, **more)
    runner, _ = open_runner(load_model(check_folder(settings), settings, CPU), settings, CPU)
    try:
        yield runner
    finally:
        runner.close()


@pytest.mark.parametrize("architecture", covered("on a CPU"))
def test_logits_are_the_same_in_any_company(architecture: Architecture, tmp_path: Path) -> None:
    with runner_of(architecture.make(tmp_path / "model")) as runner:
        assert runner.fixed_rows in (1, 2, 4, 8)
        check_company(runner)


def test_answers_are_those_of_any_number_of_rows(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    requests = [([9, 40, 3 * length, *range(8, 8 + length)], 6) for length in (1, 12, 60)]
    settings = LlmSettings(folder, page_size=8, kv_cache_bytes=1 << 22)
    plain, _ = open_runner(load_model(check_folder(settings), settings, CPU), settings, CPU)
    expected, _ = answer_logits(plain, requests)
    plain.close()
    for rows in (1, 3, 16):
        with runner_of(folder, deterministic_rows=rows) as runner:
            found, _ = answer_logits(runner, requests)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
                assert one.argmax(-1).tolist() == other.argmax(-1).tolist()


def test_models_with_experts_are_computed_row_by_row_on_a_cpu(tmp_path: Path) -> None:
    """Products of transformers' experts have as many rows as chose the expert."""
    with runner_of(tiny_mixtral(tmp_path / "model"), deterministic_rows=8) as runner:
        assert runner.fixed_rows == 1


def test_blocks_become_smaller_until_equal_rows_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "are_alike", lambda logits: len(logits) < 3)
    with runner_of(tiny_llama(tmp_path / "model"), deterministic_rows=8) as runner:
        assert runner.fixed_rows == 2


def test_chunks_are_divided_into_blocks() -> None:
    sequence = Sequence([5] * 100, 120)
    chunks = [Chunk(sequence, 99, 1, True), Chunk(sequence, 0, 11, False), Chunk(sequence, 40, 1, True)]
    chunks += [Chunk(sequence, 11, 4, True), Chunk(sequence, 20, 2, True)]
    blocks = list(blocks_of(chunks, range(5), 6, most_singles=6, most_others=2))
    cuts = [[(part.start, part.count, part.samples) for part in block.parts] for block in blocks]
    assert cuts == [
        [(99, 1, True), (40, 1, True), (0, 4, False)],
        [(4, 6, False)],
        [(10, 1, False), (11, 4, True)],
        [(20, 2, True)],
    ]
    assert [(block.singles, block.ended) for block in blocks] == [(2, [0, 2]), (0, []), (0, [1, 3]), (0, [4])]
    singles = list(blocks_of(chunks, [0, 2], 6, most_singles=1, most_others=2))
    assert [block.ended for block in singles] == [[0], [2]]


def test_pages_of_prompts_with_logprobs_are_not_shared(tmp_path: Path) -> None:
    """A GPU computes them kernel by kernel, other prompts in graphs."""
    with runner_of(tiny_llama(tmp_path / "model")) as runner:
        scheduler = make_scheduler(runner, max_running=2, max_step_tokens=64, prefix_cache=True)

    class Receiver:
        def rows_of(self, start: int, end: int) -> int:
            return 0

        def add(self, start: int, logits: Any) -> None:
            pass

    prompt = list(range(8, 48))
    for receiver in (Receiver(), None, None):
        before = scheduler.prefix_hits
        sequence = Sequence(list(prompt), len(prompt) + 1, prompt_logprobs=receiver)
        scheduler.add(sequence)
        while sequence.state != Sequence.FINISHED:
            plan = scheduler.schedule()
            scheduler.commit(plan, [7] * sum(chunk.samples for chunk in plan))
            if len(sequence.tokens) == sequence.limit:
                scheduler.finish([sequence])
        hits = scheduler.prefix_hits - before
    assert (before, hits) == (0, 32)


ASKED: list[dict[str, Any]] = [
    {"seed": 1},
    {"temperature": 0.0},
    {"seed": 2, "temperature": 0.7, "top_p": 0.9, "logprobs": 3},
    {"seed": 3, "top_k": 40, "repetition_penalty": 1.2},
    {"seed": 4, "min_p": 0.05, "top_p": 0.6},
    {"temperature": 0.0, "logprobs": 2},
]


def test_rows_are_sampled_by_themselves() -> None:
    sampler = Sampler(40_000, "cpu", separate_rows=True)

    def sampled(asked: list[dict[str, Any]], logits: torch.Tensor) -> SamplerOutput:
        return sampler.sample(logits, [SamplingState(Sampling(**fields), [1, 2, 3]) for fields in asked])

    for trial in range(10):
        random.seed(trial)
        order = random.sample(range(len(ASKED)), len(ASKED))
        logits = torch.randn(len(ASKED), 40_000, generator=torch.Generator().manual_seed(trial)).mul_(2)
        together = sampled([ASKED[index] for index in order], logits[order])
        for place, index in enumerate(order):
            alone = sampled([ASKED[index]], logits[index : index + 1])
            assert (alone.tokens, alone.logprobs) == ([together.tokens[place]], [together.logprobs[place]])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"deterministic": "perhaps"}, "deterministic"),
        ({"deterministic_rows": "8"}, "deterministic_rows needs deterministic"),
        ({"deterministic": "true", "deterministic_rows": "0"}, "deterministic_rows"),
        ({"deterministic": "true", "tensor_parallel": "2"}, "deterministic does not work with tensor_parallel yet"),
        ({"deterministic": "true", "adapters": "a=b"}, "deterministic does not work with adapters yet"),
        ({"deterministic": "true", "max_adapters": "2"}, "deterministic does not work with max_adapters yet"),
    ],
)
def test_what_cannot_be_deterministic_is_refused(parameters: dict[str, str], message: str, tmp_path: Path) -> None:
    files = ModelFiles(tmp_path, 1, tmp_path)
    with pytest.raises(InvalidArgument, match=message):
        read_settings(ModelConfig("writer", "llm", parameters=parameters), files)
