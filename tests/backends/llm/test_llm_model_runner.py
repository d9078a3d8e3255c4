# SPDX-License-Identifier: Apache-2.0
"""Steps of real, tiny models: greedy output equals transformers' `generate`, however the prompt is chunked."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers

from headrace.backends.llm.model_runner.model_loader import check_folder, context_length, load_model, open_runner
from headrace.backends.llm.model_runner.runner import ModelRunner, PromptInputs
from headrace.backends.llm.page_pool import PagePool
from headrace.backends.llm.scheduler import Scheduler, Sequence
from headrace.backends.llm.settings import LlmSettings
from headrace.core.errors import FailedPrecondition
from support import llm_models

CPU = torch.device("cpu")
EOS = 1
NEW = 16
PROMPTS = [[(7 * number + 3 * place * place) % 500 + 8 for place in range(1 + 3 * number)] for number in range(20)]


@cache
def expected_of_llama() -> list[list[int]]:
    with TemporaryDirectory() as folder:
        return expected(llm_models.tiny_llama(Path(folder) / "model"))


def expected(folder: Path, prompts: list[list[int]] = PROMPTS, **more: Any) -> list[list[int]]:
    """What transformers says, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **more)
    said = []
    for prompt in prompts:
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0].tolist()
        said.append(tokens[len(prompt) :])
    return said


@contextmanager
def runner_of(folder: Path, **more: Any) -> Iterator[ModelRunner]:
    settings = LlmSettings(folder, page_size=more.pop("page_size", 8), **more)
    runner, _ = open_runner(load_model(check_folder(settings), settings, CPU), settings, CPU)
    try:
        yield runner
    finally:
        runner.close()


def said_by(
    runner: ModelRunner,
    prompts: list[list[int]] = PROMPTS,
    *,
    pages: int = 0,
    max_running: int = 32,
    max_step_tokens: int = 512,
    prefix_cache: bool = True,
    prompt_inputs: Callable[[list[int]], PromptInputs | None] = lambda prompt: None,
) -> tuple[list[list[int]], Scheduler]:
    pool = PagePool(pages or runner.cache.pages, runner.page_size, prefix_cache=prefix_cache)
    scheduler = Scheduler(pool, max_running=max_running, max_step_tokens=max_step_tokens)
    sequences = [Sequence(list(prompt), len(prompt) + NEW, prompt_inputs=prompt_inputs(prompt)) for prompt in prompts]
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.idle:
        plan = scheduler.schedule()
        tokens = runner.launch(plan, greedy=True).tokens()
        for number, sequence in scheduler.commit(plan, tokens):
            if tokens[number] == EOS or len(sequence.tokens) == sequence.limit:
                scheduler.finish([sequence])
    assert pool.used == 0
    return [sequence.tokens[sequence.prompt_length :] for sequence in sequences], scheduler


def test_greedy_answers_are_those_of_transformers(tmp_path: Path) -> None:
    wanted = expected_of_llama()
    assert len({tuple(tokens) for tokens in wanted}) > 15, "a model that says the same to all shows nothing"
    with runner_of(llm_models.tiny_llama(tmp_path / "model")) as runner:
        assert [said_by(runner, [prompt])[0][0] for prompt in PROMPTS] == wanted
        assert said_by(runner)[0] == wanted
        assert said_by(runner, prefix_cache=False)[0] == wanted
        assert said_by(runner, max_running=3, max_step_tokens=1)[0] == wanted, "in chunks of eight"
        told, scheduler = said_by(runner, pages=24, max_running=8)
        assert told == wanted
        assert scheduler.preemptions > 0


@pytest.mark.parametrize("make", [llm_models.tiny_qwen2, llm_models.tiny_mistral, llm_models.tiny_gemma3])
def test_other_families_and_sliding_windows(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder, prompts = make(tmp_path / "model"), PROMPTS[::4]
    wanted = expected(folder, prompts)
    with runner_of(folder) as runner:
        assert said_by(runner, prompts)[0] == wanted
        assert said_by(runner, prompts, max_running=3, max_step_tokens=1)[0] == wanted


def test_a_prompt_that_was_computed_before_changes_nothing(tmp_path: Path) -> None:
    wanted = expected_of_llama()
    with runner_of(llm_models.tiny_llama(tmp_path / "model")) as runner:
        told, scheduler = said_by(runner, [*PROMPTS, *PROMPTS], max_running=2)
    assert told == [*wanted, *wanted]
    assert scheduler.prefix_hits > sum(map(len, PROMPTS)) // 2


@pytest.mark.parametrize(
    ("config", "model", "more"),
    [
        ("Gemma2Config", "Gemma2ForCausalLM", {"attn_logit_softcapping": 5.0, "head_dim": 16, "sliding_window": 16}),
        (
            "GptOssConfig",
            "GptOssForCausalLM",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
        ),
    ],
)
def test_models_with_a_cap_on_scores_or_with_sinks(
    config: str, model: str, more: dict[str, Any], tmp_path: Path
) -> None:
    folder = llm_models._tiny(tmp_path / "model", config, model, more)
    prompts = PROMPTS[::4]
    wanted = expected(folder, prompts, attn_implementation="eager")
    with runner_of(folder) as runner:
        assert said_by(runner, prompts)[0] == wanted
        assert said_by(runner, prompts, max_running=3, max_step_tokens=1)[0] == wanted


def test_long_and_short_contexts_are_not_padded_to_one_length(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "model")
    prompts = [[9] * 600, *PROMPTS[:12]]
    with runner_of(folder, page_size=4) as runner:
        together, _ = said_by(runner, prompts, max_step_tokens=1024)
        assert together == [said_by(runner, [prompt])[0][0] for prompt in prompts]


def test_embeddings_of_a_prompt_stand_in_for_its_tokens(tmp_path: Path) -> None:
    wanted = expected_of_llama()
    with runner_of(llm_models.tiny_llama(tmp_path / "model")) as runner:

        def received_pages(prompt: list[int]) -> PromptInputs | None:
            if len(prompt) % 2:
                return None
            return PromptInputs(embeddings=runner.embed(torch.tensor(prompt)))

        wrong = [[5] * len(prompt) if len(prompt) % 2 == 0 else prompt for prompt in PROMPTS]
        by_prompt = {len(prompt): prompt for prompt in PROMPTS}
        told, _ = said_by(
            runner, wrong, prefix_cache=False, prompt_inputs=lambda prompt: received_pages(by_prompt[len(prompt)])
        )
    assert told == wanted


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on CPUs without such numbers
def test_16_bits_are_computed_as_transformers_does(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "model")
    with runner_of(folder, dtype="bfloat16") as runner:
        assert runner.dtype is torch.bfloat16
        told, _ = said_by(runner)
    assert all(len(tokens) == NEW or tokens[-1] == EOS for tokens in told)


def test_the_cache_has_the_configured_size(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "model")
    # 2 layers of 2 heads of 16 numbers of 4 bytes, keys and values: 512 bytes a token.
    with runner_of(folder, page_size=16, kv_cache_bytes=512 * 16 * 10 + 5) as runner:
        assert runner.cache.pages == 10
    with runner_of(folder, page_size=16, max_running=2, max_model_len=100) as runner:
        assert runner.cache.pages == 14, "more than all that may run could never be used"
    with pytest.raises(FailedPrecondition, match="kv_cache_bytes"), runner_of(folder, kv_cache_bytes=1000):
        pass


def test_a_context_ends_before_positions_are_turned_differently(tmp_path: Path) -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 1e4}
    rope = {**factors, "original_max_position_embeddings": 64}
    folder = llm_models.tiny_llama(tmp_path / "model", rope_parameters=rope)
    settings = LlmSettings(folder)
    model = load_model(check_folder(settings), settings, CPU)
    assert context_length(model, settings) == 64
    assert context_length(model, LlmSettings(folder, max_model_len=48)) == 48


def test_closing_leaves_nothing_with_transformers(tmp_path: Path) -> None:
    before = set(transformers.AttentionInterface._global_mapping)
    with runner_of(llm_models.tiny_llama(tmp_path / "model")):
        assert len(set(transformers.AttentionInterface._global_mapping) - before) == 1
    assert set(transformers.AttentionInterface._global_mapping) == before


def refused(folder: Path) -> str:
    with (
        warnings.catch_warnings(),
        pytest.raises(FailedPrecondition) as raised,
    ):
        warnings.simplefilter("ignore")  # of transformers, about what it lacks
        with runner_of(folder):
            pass
    return raised.value.message


def test_models_that_attend_in_another_way_are_refused(tmp_path: Path) -> None:
    mamba = {"state_size": 4, "num_hidden_layers": 2, "hidden_size": 32}
    folder = llm_models._tiny(tmp_path / "mamba", "MambaConfig", "MambaForCausalLM", mamba)
    assert "MambaForCausalLM cannot be served by backend 'llm'" in refused(folder)
    gptj = {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8, "n_positions": 64}
    folder = llm_models._tiny(tmp_path / "gptj", "GPTJConfig", "GPTJForCausalLM", gptj)
    assert "openai_proxy" in refused(folder)
    (folder / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": true}')
    assert "an encoder and a decoder" in refused(folder)


def test_bad_folders_are_refused_with_what_to_do(tmp_path: Path) -> None:
    assert "no config.json" in refused(tmp_path / "nothing")
    folder = llm_models.tiny_llama(tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "convert them to safetensors" in refused(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "has no *.safetensors" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "is not JSON" in refused(folder)
    (folder / "config.json").write_text("{}")
    assert "names no architectures" in refused(folder)


def test_a_folder_with_false_facts_about_its_weights_is_refused(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1_000_000}))
    assert "says num_hidden_layers: 1000000" in refused(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "lack 9 tensors of LlamaForCausalLM, such as 'model.layers.2." in refused(folder)


def test_damaged_weights_are_refused_without_the_text_of_a_library(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "model")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()  # it is a link into the cache of models
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "'model/model.safetensors' is not a complete safetensors file" in refused(folder)
    (folder / "model.safetensors").write_bytes(weights[:-100])
    text = refused(folder)
    assert "cannot load the model in 'model'" in text
    assert "the server's log has the details" in text


def test_code_in_a_folder_runs_only_if_allowed(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass OwnConfig: pass\nclass OwnModel: pass\n"
    )
    assert "set parameter trust_remote_code to true" in refused(folder)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": ["own"]}))
    assert "set parameter trust_remote_code to true" in refused(folder)
    assert not (tmp_path / "ran").exists()
