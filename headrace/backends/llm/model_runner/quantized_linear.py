# SPDX-License-Identifier: Apache-2.0
"""A linear layer with quantised weights: they stay packed in memory, and each product dequantises them.

`packed_weights` computes it on a CPU, `quantized_cuda` on a GPU.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import torch
from torch import nn

from headrace.backends.llm.model_runner import quantized_cuda
from headrace.backends.llm.model_runner.packed_weights import PackedWeights, multiply_in_chunks


class QuantizedLinear(nn.Module):
    """In place of `nn.Linear`."""

    def __init__(self, weights: PackedWeights, bias: nn.Parameter | None, outputs: int, inputs: int) -> None:
        super().__init__()
        self.out_features, self.in_features = outputs, inputs
        self.block, self.bits = weights.block, weights.bits
        # Buffers: the model's dtype is the dtype of its first parameter.
        self.register_buffer("weight_values", weights.values)
        self.register_buffer("weight_scales", weights.scales)
        self.register_buffer("weight_zeros", weights.zeros)
        self.register_buffer("input_order", weights.order)
        self.bias = bias
        self.fp8_product = False
        """On a GPU: whether PyTorch's FP8 product computes this layer. `quantized_cuda.prepare` decides."""

    @property
    def weights(self) -> PackedWeights:
        """The weights where they are now."""
        return PackedWeights(
            self.weight_values, self.weight_scales, self.block, self.bits, self.weight_zeros, self.input_order
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the projection of `hidden`, `[..., inputs]`."""
        rows = hidden.reshape(-1, self.in_features)
        if self.input_order is not None:
            rows = rows.index_select(1, self.input_order)
        if self.fp8_product:
            product = quantized_cuda.fp8_product(rows, self.weight_values, self.weight_scales)
        elif rows.is_cuda:
            product = quantized_cuda.multiply(
                rows, self.weight_values, self.weight_scales, self.weight_zeros, self.block
            )
        else:
            product = multiply_in_chunks(rows, self.weights)
        if self.bias is not None:
            product = product + self.bias
        return product.view(*hidden.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return the sizes, as `nn.Linear` does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, block={self.block}"
