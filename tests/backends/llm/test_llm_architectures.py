# SPDX-License-Identifier: Apache-2.0
"""The architectures of `support.architectures`, one tiny model each: answers, adapters and quantised weights; the table.

Each is compared with transformers on a CPU. `test_llm_cuda_graphs.py` has what graphs compute, without a GPU, and
`test_llm_architectures_cuda.py` with one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from headrace.backends.llm.lora import load_adapters
from headrace.backends.llm.model_runner.model_loader import check_folder, load_model, open_runner
from headrace.backends.llm.model_runner.quantized_linear import QuantizedLinear
from headrace.backends.llm.settings import LlmSettings
from support.architectures import ARCHITECTURES, COLUMNS, TESTS, UNTESTED, VISION, Architecture, covered, table
from support.llm_steps import greedy_answers

CPU = torch.device("cpu")
NEW = 8
PROMPTS = [[(7 * number + 3 * place * place) % 500 + 8 for place in range(1 + 14 * number)] for number in range(3)]
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "architectures.md"


def loaded(folder: Path, **more: Any) -> Any:
    settings = LlmSettings(folder, **more)
    return load_model(check_folder(settings), settings, CPU)


def reference(folder: Path) -> Any:
    """transformers' own model; its own attention, since others leave out caps and sinks."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def wanted(model: Any) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )
        answers.append(made[0, len(prompt) :].tolist())
    return answers


def answers(model: Any, *, adapter: str = "", adapters: Any = None, step_tokens: int = 64) -> list[list[int]]:
    """Greedy answers to all prompts, computed together."""
    runner, _ = open_runner(model, LlmSettings(Path(), page_size=8, kv_cache_bytes=1 << 22), CPU)
    if adapters is not None:
        runner.before_forward = adapters.select_rows
    found = greedy_answers(runner, PROMPTS, NEW, step_tokens=step_tokens, adapter=adapter)
    runner.close()
    return found


@pytest.mark.parametrize("architecture", covered("on a CPU"))
def test_answers_are_those_of_transformers(architecture: Architecture, tmp_path: Path) -> None:
    folder = architecture.make(tmp_path / "model")
    expected = wanted(reference(folder))
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    assert answers(loaded(folder)) == expected
    assert answers(loaded(folder), step_tokens=10) == expected, "in chunks"


def linear_layers(model: Any) -> dict[str, Any]:
    """The layers that an adapter of all linear layers changes."""
    head = model.get_output_embeddings()
    layers = {name: layer for name, layer in model.named_modules() if type(layer).__name__ in ("Linear", "Conv1D")}
    return {name: layer for name, layer in layers.items() if layer is not head}


@pytest.mark.parametrize("architecture", covered("adapters"))
def test_adapters_change_answers_as_merged_weights_do(architecture: Architecture, tmp_path: Path) -> None:
    folder = architecture.make(tmp_path / "model")
    model = reference(folder)
    before = wanted(model)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    torch.manual_seed(11)
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, layer in linear_layers(model).items():
            is_linear = type(layer).__name__ == "Linear"
            outputs, inputs = layer.weight.shape if is_linear else layer.weight.T.shape
            lora_a, lora_b = torch.randn(2, inputs) / 4, torch.randn(outputs, 2) / 4
            tensors |= {
                f"base_model.model.{name}.lora_A.weight": lora_a,
                f"base_model.model.{name}.lora_B.weight": lora_b,
            }
            change = 2.0 * lora_b @ lora_a
            layer.weight += change if is_linear else change.T
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    expected = wanted(model)
    assert expected != before
    ours = loaded(folder)
    adapters = load_adapters(ours, {"changed": adapter})
    assert answers(ours, adapter="changed", adapters=adapters) == expected
    ours = loaded(folder)
    assert answers(ours, adapters=load_adapters(ours, {"changed": adapter})) == before


@pytest.mark.parametrize("architecture", covered("quantised"))
def test_weights_made_fp8_compute_what_they_stand_for(architecture: Architecture, tmp_path: Path) -> None:
    folder = architecture.make(tmp_path / "model")
    model, expected = loaded(folder, quantization="fp8"), reference(folder)
    twins = dict(expected.named_modules())
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert layers
    with torch.inference_mode():
        for name, layer in layers.items():
            twins[name].weight.copy_(layer.weights.dequantize(0, layer.out_features))
        ids = torch.tensor([PROMPTS[-1]])
        model.config._attn_implementation = "eager"
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-3, atol=1e-3)


def test_the_guide_has_this_table() -> None:
    found = GUIDE.read_text().partition("<!-- architectures:start -->\n")[2].partition("<!-- architectures:end -->")[0]
    assert found == table(), f"put this between the marks in {GUIDE}:\n{table()}"


def test_every_cell_names_a_test_that_exists() -> None:
    def defined(name: str) -> bool:
        file, _, function = name.partition("::")
        return re.search(rf"^def {function}\(", (Path(__file__).parent / file).read_text(), re.MULTILINE) is not None

    names = [TESTS[column] for column in COLUMNS]
    names += [name for architecture in ARCHITECTURES for name in architecture.tests.values()]
    assert [name for name in names if not defined(name)] == []
    for architecture in VISION:
        for column in ("adapters", "quantised"):
            assert (architecture.cell(column) == UNTESTED) == (column not in architecture.tests)
