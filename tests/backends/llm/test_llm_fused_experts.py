# SPDX-License-Identifier: Apache-2.0
"""Fused experts on a CPU: the order of pairs, their tiles, and what models compute with products in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.backends.llm.model_runner import fused_experts
from support.fused_experts import plain_products
from support.llm_models import tiny_config

FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 16},
    "GptOss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16},
}


@pytest.fixture(autouse=True)
def products_in_pytorch() -> None:
    fused_experts.register()[1].register_kernel("cpu")(plain_products)


@pytest.mark.parametrize("experts", [1, 5, 128])
@pytest.mark.parametrize("tokens", [1, 8, 21, 33, 400])
def test_each_pair_is_in_one_tile_of_its_expert(tokens: int, experts: int) -> None:
    torch.manual_seed(tokens)
    each = min(3, experts)
    chosen = torch.rand(tokens, experts).topk(each).indices
    order, tiles = torch.ops.headrace.sort_by_expert(chosen, experts)
    pairs = tokens * each
    count, most = fused_experts.tile_count(pairs, experts), fused_experts.tile_pairs(pairs, experts)
    seen: list[int] = []
    for expert, first, length in tiles[:count].tolist():
        assert length <= most
        mine = order[first : first + length].tolist()
        assert all(int(chosen.view(-1)[pair]) == expert for pair in mine)
        seen += mine
    assert sorted(seen) == list(range(pairs))


def test_one_expert_may_get_all_tokens_and_others_none() -> None:
    chosen = torch.full((300, 1), 6)
    order, tiles = torch.ops.headrace.sort_by_expert(chosen, 8)
    used = tiles[: fused_experts.tile_count(300, 8)]
    assert used[:, 2].tolist() == [64, 64, 64, 64, 44, 0, 0, 0, 0, 0, 0, 0]
    assert order.tolist() == list(range(300))


@pytest.mark.parametrize("tokens", [1, 20, 150])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_what_transformers_does(family: str, tokens: int) -> None:
    import transformers

    torch.manual_seed(3)
    config = tiny_config(f"{family}Config", **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.config._experts_implementation = "eager"
    ids = torch.randint(8, 500, (1, tokens))
    with torch.inference_mode():
        expected = model(ids).logits
        with fused_experts.using_fused_experts(model):
            assert model.config._experts_implementation == fused_experts.EXPERTS
            found = model(ids).logits
    assert model.config._experts_implementation == "eager"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_experts_without_a_gate_and_with_a_norm_after_them() -> None:
    class Experts(torch.nn.Module):
        has_gate, has_bias, is_transposed, has_post_expert_norm = False, True, False, True

        def __init__(self) -> None:
            super().__init__()
            self.up_proj, self.up_proj_bias = torch.randn(3, 10, 6), torch.randn(3, 10)
            self.down_proj, self.down_proj_bias = torch.randn(3, 6, 10), torch.randn(3, 6)
            self.act_fn, self.post_expert_norm = torch.relu, lambda rows: rows * 2

    torch.manual_seed(5)
    module, hidden = Experts(), torch.randn(4, 6)
    chosen, weights = torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0]]), torch.rand(4, 2)
    expected = torch.zeros(4, 6)
    for token in range(4):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            inner = torch.relu(module.up_proj[expert] @ hidden[token] + module.up_proj_bias[expert])
            expected[token] += 2 * weight * (module.down_proj[expert] @ inner + module.down_proj_bias[expert])
    torch.testing.assert_close(fused_experts.compute_experts(module, hidden, chosen, weights), expected)


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_layers_with_fused_experts_are_traced_whole(family: str) -> None:
    """As torch.compile does on a GPU, for any number of tokens; here without code generation."""
    import transformers

    torch.manual_seed(3)
    config = tiny_config(f"{family}Config", num_hidden_layers=1, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    experts = fused_experts.expert_modules(model)
    assert len(experts) == 1
    with torch.inference_mode(), fused_experts.using_fused_experts(model):
        traced = torch.compile(experts[0], backend="eager", dynamic=True, fullgraph=True)
        for tokens in (3, 40, 200):
            hidden = torch.randn(tokens, config.hidden_size)
            weights, chosen = torch.rand(tokens, 5).topk(2)
            torch.testing.assert_close(traced(hidden, chosen, weights), experts[0](hidden, chosen, weights))
