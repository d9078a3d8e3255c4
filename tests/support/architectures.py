# SPDX-License-Identifier: Apache-2.0
"""The architectures of language models that tests cover, and how: the source of the table in docs/guides/architectures.md.

for architecture in TEXT: folder = architecture.make(tmp_path / "model")        # a tiny model with random weights

Each cell of the table stands for a test. Tests are parametrised by `covered` and `kinds_with_pictures`, so that a cell
cannot claim a test that does not run; `test_llm_architectures.py` compares the table with this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.llm_models import tiny_model

HERE = "tested"
"""By `make test`, on a CPU."""
H200 = "H200"
"""By hand, on an H200."""
UNTESTED = "not tested"
NO = "no"
"""It cannot be."""
NO_PICTURES = "text only"
COLUMNS = ("on a CPU", "captured", "compiled", "adapters", "vision", "quantised")

_GRAPHS = "test_llm_architectures_cuda.py::test_graphs_answer_as_transformers_does"
_COMPILED = "test_llm_architectures_cuda.py::test_compiled_graphs_answer_as_transformers_does"
TESTS = {
    "on a CPU": "test_llm_architectures.py::test_answers_are_those_of_transformers",
    "captured": _GRAPHS,
    "compiled": _COMPILED,
    "adapters": "test_llm_architectures.py::test_adapters_change_answers_as_merged_weights_do",
    "vision": "test_llm_vision.py::test_a_prompt_with_pictures_gets_what_transformers_generates",
    "quantised": "test_llm_architectures.py::test_weights_made_fp8_compute_what_they_stand_for",
}
"""By column: the test that a cell of it stands for, where the architecture names no other."""


_NAMES = {"GPT2": ("GPT2Config", "GPT2LMHeadModel"), "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
"""Classes that are named in another way."""


@dataclass(frozen=True)
class Architecture:
    """A row of the table."""

    name: str
    kind: str
    """How transformers' classes begin."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the configuration of a tiny model."""
    gpu: str = H200
    """Of the columns about graphs."""
    cells: dict[str, str] = field(default_factory=dict)
    """By column, where it is not the default."""
    tests: dict[str, str] = field(default_factory=dict)
    """By column: the test, where it is another than in `TESTS`."""
    quick: bool = False
    """Whether its tests on a CPU are among the quick ones."""

    def cell(self, column: str) -> str:
        """Return what the table says."""
        default = {"captured": self.gpu, "compiled": self.gpu, "vision": NO_PICTURES}.get(column, HERE)
        return self.cells.get(column, default)

    def make(self, folder: Path, **more: Any) -> Path:
        """Write a tiny model of text."""
        config, model = _NAMES.get(self.kind, (f"{self.kind}Config", f"{self.kind}ForCausalLM"))
        return tiny_model(folder, config, model, **{**self.settings, **more})


_NOT_COMPILED = {"compiled": UNTESTED}
"""Run with graphs on an H200, without a record of whether layers were compiled."""
TEXT = (
    Architecture("Llama", "Llama"),
    Architecture("Qwen2", "Qwen2", cells=_NOT_COMPILED),
    Architecture("Qwen3", "Qwen3", {"head_dim": 16}, cells=_NOT_COMPILED),
    Architecture("Mistral", "Mistral", {"sliding_window": 24}, cells=_NOT_COMPILED),
    Architecture(
        "Gemma 2", "Gemma2", {"attn_logit_softcapping": 5.0, "head_dim": 16, "sliding_window": 16}, quick=True
    ),
    Architecture(
        "Gemma 3",
        "Gemma3",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
        cells=_NOT_COMPILED,
    ),
    Architecture("GPT-2", "GPT2", cells={**_NOT_COMPILED, "quantised": NO}),
    Architecture("Phi-3", "Phi3", cells=_NOT_COMPILED),
    Architecture("OLMo 2", "Olmo2", cells=_NOT_COMPILED),
    Architecture("Granite", "Granite", cells=_NOT_COMPILED),
    Architecture("StarCoder2", "Starcoder2", cells=_NOT_COMPILED),
    Architecture("Mixtral", "Mixtral", {"num_local_experts": 4}),
    Architecture(
        "Qwen3-MoE",
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
        quick=True,
    ),
    Architecture(
        "gpt-oss",
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
        quick=True,
    ),
    Architecture(
        "DeepSeek-V3",
        "DeepseekV3",
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
        },
        quick=True,
    ),
)
_SEEN = {**_NOT_COMPILED, "vision": HERE, "adapters": UNTESTED, "quantised": UNTESTED}
_WITH_PICTURES = {"on a CPU": TESTS["vision"]}
VISION = (
    Architecture(
        "Qwen2-VL",
        "Qwen2VL",
        cells={**_NOT_COMPILED, "vision": HERE},
        tests={
            **_WITH_PICTURES,
            "adapters": "test_llm_vision.py::test_an_adapter_of_the_image_encoder",
            "quantised": "test_llm_quantised.py::test_a_vision_language_model_whose_checkpoint_has_other_names",
        },
        quick=True,
    ),
    Architecture("Qwen2.5-VL", "Qwen2_5_VL", cells=_SEEN, tests=_WITH_PICTURES),
    Architecture("Qwen3-VL", "Qwen3VL", cells=_SEEN, tests=_WITH_PICTURES, quick=True),
    Architecture("LLaVA", "Llava", gpu=UNTESTED, cells=_SEEN, tests=_WITH_PICTURES, quick=True),
)
ARCHITECTURES = (*TEXT, *VISION)


def covered(column: str, *, on_gpu: bool = False) -> list[Any]:
    """Return parameters for tests: the text models that the column says are tested; `on_gpu`, those that may be, too."""
    found = [each for each in TEXT if each.cell(column) in ((HERE, H200, UNTESTED) if on_gpu else (HERE, H200))]
    return [pytest.param(each, id=each.kind, marks=() if each.quick or on_gpu else pytest.mark.slow) for each in found]


def kinds_with_pictures() -> list[Any]:
    """Return parameters for tests: the kinds of the models that see."""
    return [pytest.param(each.kind, marks=() if each.quick else pytest.mark.slow) for each in VISION]


def table() -> str:
    """Return the table in Markdown."""
    rows = [("architecture", *COLUMNS), ("---",) * (1 + len(COLUMNS))]
    rows += [(architecture.name, *(architecture.cell(column) for column in COLUMNS)) for architecture in ARCHITECTURES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
