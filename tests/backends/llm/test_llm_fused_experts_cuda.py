# SPDX-License-Identifier: Apache-2.0
"""The kernel of fused experts on a GPU, or interpreted (`support.triton_kernels`), compared with plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from headrace.backends.llm.model_runner import fused_experts
from support.fused_experts import plain_products
from support.triton_kernels import DEVICE, HALF, INTERPRETED, needs_kernels

pytestmark = needs_kernels

TOKENS = (1, 40, 200) if INTERPRETED else (1, 2, 9, 40, 64, 500, 3000)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("experts", "each", "inputs", "outputs", "transposed"),
    [(8, 2, 64, 256, False), (8, 2, 72, 40, True), (128, 8, 40, 24, False), (1, 1, 200, 130, True)],
    ids=["mixtral", "gpt-oss", "many", "one"],
)
def test_products_are_those_of_pytorch(
    experts: int, each: int, inputs: int, outputs: int, transposed: bool, tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    chosen = torch.rand(tokens, experts, device=DEVICE).topk(each).indices
    order, tiles = fused_experts.sort_by_expert(chosen, experts)
    shape = (experts, inputs, outputs) if transposed else (experts, outputs, inputs)
    weights = (torch.randn(shape, device=DEVICE) / inputs**0.5).to(dtype)
    bias = torch.randn(experts, outputs, device=DEVICE).to(dtype) if transposed else None
    # As after the first product: a row for each pair; and as before: one for each token, in a wider tensor.
    for rows, share in ((tokens * each, 1), (tokens, each)):
        hidden = torch.randn(rows, inputs + 8, device=DEVICE).to(dtype)[:, :inputs]
        found = fused_experts._multiply_experts(hidden, weights, bias, order, tiles, share, transposed)
        expected = plain_products(
            hidden.float(), weights.float(), None if bias is None else bias.float(), order, tiles, share, transposed
        )
        tolerance = 1e-4 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [3, 100, 1000])
def test_a_captured_step_routes_again_in_each_replay(tokens: int, dtype: torch.dtype) -> None:
    class Experts(torch.nn.Module):
        has_gate, has_bias, is_transposed = True, False, False

        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = (torch.randn(16, 96, 64, device=DEVICE) / 8).to(dtype)
            self.down_proj = (torch.randn(16, 64, 48, device=DEVICE) / 7).to(dtype)

        def _apply_gate(self, inner: torch.Tensor) -> torch.Tensor:
            gate, up = inner.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up

    torch.manual_seed(tokens)
    fused_experts.register()
    module = Experts()
    hidden = torch.randn(tokens, 64, device=DEVICE).to(dtype)
    scores = torch.rand(tokens, 16, device=DEVICE)

    def step() -> torch.Tensor:
        weights, chosen = scores.topk(4)
        return fused_experts.compute_experts(module, hidden, chosen, weights)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        hidden.normal_()
        scores.copy_(torch.rand_like(scores))
        graph.replay()
        weights, chosen = scores.topk(4)
        picked = chosen.view(-1)
        rows = hidden.float().repeat_interleave(4, 0)[:, :, None]
        inner = module._apply_gate((module.gate_up_proj.float()[picked] @ rows)[:, :, 0])
        expected = (module.down_proj.float()[picked] @ inner[:, :, None]).view(tokens, 4, 64) * weights[:, :, None]
        tolerance = 1e-4 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(captured.float(), expected.sum(1), atol=tolerance, rtol=tolerance)
