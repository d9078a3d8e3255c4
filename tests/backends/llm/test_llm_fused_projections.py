# SPDX-License-Identifier: Apache-2.0
"""Fused projections: the same results, in any order of calls, compiled and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from headrace.backends.llm.model_runner.fused_projections import fuse_projections
from headrace.backends.llm.model_runner.packed_weights import PackedWeights, to_fp8
from headrace.backends.llm.model_runner.quantized_linear import QuantizedLinear

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
    before, parameters = model(ids).logits, sum(parameter.numel() for parameter in model.parameters())
    assert fuse_projections(model) == groups
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
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


def int4(outputs: int, order: torch.Tensor | None = None, group: int = 16) -> PackedWeights:
    values, zeros = (
        torch.randint(0, 256, (outputs, 16), dtype=torch.uint8),
        torch.randint(0, 16, (outputs, 32 // group)),
    )
    return PackedWeights(values, torch.rand(outputs, 32 // group), (1, group), 4, zeros.byte(), order)


def blocks(outputs: int) -> PackedWeights:
    values = torch.randn(outputs, 32).to(torch.float8_e4m3fn)
    return PackedWeights(values, torch.rand(-(-outputs // 8), 2), (8, 16))


class QuantizedAttention(OtherOrder):
    def __init__(self, *weights: PackedWeights, bias: bool = False) -> None:
        super().__init__()
        for name, part in zip(("q_proj", "k_proj", "v_proj"), weights, strict=True):
            outputs = len(part.values)
            parameter = nn.Parameter(torch.randn(outputs), requires_grad=False) if bias else None
            setattr(self, name, QuantizedLinear(part, parameter, outputs, 32))


ORDER = torch.randperm(32, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "weights",
    [
        lambda: (int4(24), int4(8), int4(7)),
        lambda: (int4(24, ORDER), int4(8, ORDER.clone()), int4(8, ORDER)),
        lambda: (to_fp8(torch.randn(24, 32)), to_fp8(torch.randn(8, 32)), to_fp8(torch.randn(5, 32))),
        lambda: (blocks(24), blocks(8), blocks(16)),
    ],
    ids=["int4", "int4-act-order", "fp8", "fp8-block"],
)
def test_quantised_projections_compute_the_same_in_one_product(weights: Any, bias: bool) -> None:
    torch.manual_seed(0)
    attention, hidden = QuantizedAttention(*weights(), bias=bias), torch.randn(3, 32)
    before = attention(hidden, with_query=True)
    assert fuse_projections(attention) == 1
    for found, expected in zip(attention(hidden, with_query=True), before, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "weights",
    [
        lambda: (int4(24), int4(8), to_fp8(torch.randn(5, 32))),
        lambda: (int4(24), int4(8, group=32), int4(8)),
        lambda: (int4(24, ORDER), int4(8), int4(8)),
        lambda: (int4(24, ORDER), int4(8, ORDER.flip(0)), int4(8, ORDER)),
        lambda: (blocks(24), blocks(4), blocks(16)),
    ],
    ids=["formats", "groups", "one-order", "orders", "part-of-a-block"],
)
def test_projections_that_are_quantised_differently_stay(weights: Any) -> None:
    assert fuse_projections(QuantizedAttention(*weights())) == 0
