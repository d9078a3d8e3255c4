# SPDX-License-Identifier: Apache-2.0
"""Fused projections: the same results, in any order of calls, compiled and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from headrace.backends.llm.model_runner.fused_projections import fuse_projections

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (transformers.LlamaConfig, 4),
        (transformers.Qwen2Config, 4),  # with biases
        (transformers.Qwen3Config, 4),
        (transformers.GemmaConfig, 4),
        (transformers.MixtralConfig, 2),  # experts are not fused
        (transformers.Phi3Config, 0),  # fused by itself
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_a_model_computes_the_same_with_fewer_products(config: Any, groups: int) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**SIZES)).eval().requires_grad_(False)
    ids = torch.randint(2, 50, (1, 9))
    before, parameters = model(ids).logits, sum(each.numel() for each in model.parameters())
    assert fuse_projections(model) == groups
    assert sum(each.numel() for each in model.parameters()) == parameters
    for _ in range(2):
        torch.testing.assert_close(model(ids).logits, before)


class OtherOrder(nn.Module):
    """Calls the projections in another order, and one of them not always."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(4, 6), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, hidden: torch.Tensor, *, with_query: bool) -> list[torch.Tensor]:
        results = [self.v_proj(hidden), self.k_proj(hidden)]
        return [*results, self.q_proj(hidden)] if with_query else results


def test_the_order_of_calls_does_not_matter_and_old_results_are_not_used() -> None:
    torch.manual_seed(0)
    plain = OtherOrder()
    fused = OtherOrder()
    fused.load_state_dict(plain.state_dict())
    assert fuse_projections(fused) == 1
    for with_query in (True, False, True, False):
        hidden = torch.randn(2, 4)
        for found, expected in zip(
            fused(hidden, with_query=with_query), plain(hidden, with_query=with_query), strict=True
        ):
            torch.testing.assert_close(found, expected)


def test_projections_with_hooks_or_of_another_class_stay() -> None:
    class Scaled(nn.Linear):
        pass

    one, two = OtherOrder(), OtherOrder()
    one.k_proj = Scaled(4, 2)
    two.v_proj.register_forward_hook(lambda *_: None)
    assert fuse_projections(one) == fuse_projections(two) == 0
