# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of tiny models, and what a model answers after an adapter was merged into its weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

SETTINGS: dict[str, dict[str, Any]] = {
    "anna": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "bert": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "carl": {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj", "lm_head"]},
    "dora": {"r": 3, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj", "up_proj"]},
}
"""Different ranks and layers, so that what is left of one in a slot would show in the next."""


def loaded(folder: Path) -> Any:
    """Return the model of a folder as transformers has it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def save_adapters(base: Path, folder: Path, settings: Mapping[str, Mapping[str, Any]] = SETTINGS) -> Path:
    """Save an adapter for each entry below a folder, with matrices that change a lot."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(), warnings.catch_warnings():
        # That it saves the embeddings with an adapter of the head, as it does for everybody.
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers` to `True`")
        torch.manual_seed(23)
        for name, given in settings.items():
            changed = get_peft_model(loaded(base), LoraConfig(task_type="CAUSAL_LM", **given))
            for key, parameter in changed.named_parameters():
                if "lora_" in key or "modules_to_save" in key:
                    parameter.data.normal_(0, 0.3)
            changed.save_pretrained(folder / name)
    return folder


def merged_answers(
    base: Path, adapters: Mapping[str, Path], prompts: Sequence[Sequence[int]], tokens: int
) -> dict[tuple[str, int], list[int]]:
    """Return greedy tokens of the base model ("") and of each adapter merged into it, by adapter and prompt."""
    from peft import PeftModel

    answers: dict[tuple[str, int], list[int]] = {}
    for name in ("", *adapters):
        model = loaded(base)
        if name:
            model = PeftModel.from_pretrained(model, adapters[name]).merge_and_unload().eval()
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([list(prompt)])
            answer = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, eos_token_id=None, pad_token_id=2,
            )  # fmt: skip
            answers[name, number] = answer[0, len(prompt) :].tolist()
    return answers
