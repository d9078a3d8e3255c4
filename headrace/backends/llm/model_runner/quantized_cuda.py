# SPDX-License-Identifier: Apache-2.0
"""Products with quantised weights on a GPU: PyTorch's FP8 product, a Triton kernel for a few rows, else dequantised weights.

`tests/backends/llm/test_llm_quantised_cuda.py` compares each way with dequantised weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from headrace.backends.llm.model_runner.packed_weights import FP8_MAX, PackedWeights, multiply_in_chunks

_KERNEL_ROWS = 64
"""Up to so many rows, reading packed weights costs more than the product; beyond, dequantised weights and cuBLAS win."""
_ALIGNMENT = 16
"""PyTorch's FP8 product needs sizes that are multiples of this; the kernel, groups that are."""


def prepare(layers: Iterable[Any], device: torch.device) -> None:
    """Choose how `QuantizedLinear` layers multiply on a GPU.

    Call it before their first product, because torch.compile should not see the choice.
    """
    _register()
    has_product = _has_fp8_product(device)
    for layer in layers:
        per_output = layer.weight_zeros is None and layer.block == (1, layer.in_features)
        aligned = layer.out_features % _ALIGNMENT == 0 and layer.in_features % _ALIGNMENT == 0
        layer.fp8_product = has_product and per_output and aligned


def multiply(
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    block: tuple[int, int],
) -> torch.Tensor:
    """Return `rows @ weights.T` for weights as in `PackedWeights`."""
    product: torch.Tensor = torch.ops.headrace.multiply_quantized(rows, values, scales, zeros, *block)
    return product


def fp8_product(rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the product of FP8 weights with a scale for each output, and rows that are made FP8 with a scale for each."""
    row_scales = (rows.abs().amax(dim=1, keepdim=True).float() / FP8_MAX).clamp(min=1e-12)
    quantized = (rows.float() / row_scales).clamp(-FP8_MAX, FP8_MAX).to(values.dtype)
    product = torch._scaled_mm(quantized, values.t(), row_scales, scales.t(), out_dtype=torch.bfloat16)
    return product.to(rows.dtype)


def _has_fp8_product(device: torch.device) -> bool:
    """Return whether PyTorch multiplies FP8 with a scale for each row on this GPU."""
    weights, ones = torch.ones(32, 32, device=device), torch.ones(32, 1, device=device)
    try:
        product = fp8_product(weights.bfloat16(), weights.to(torch.float8_e4m3fn), ones)
        return bool(product.isfinite().all())
    except (RuntimeError, AttributeError, TypeError, ValueError):  # an older GPU or PyTorch
        return False


def _multiply_quantized(
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    block_rows: int,
    block_columns: int,
) -> torch.Tensor:
    bits = 8 * values.shape[1] // rows.shape[1]
    # Triton reads FP8 on GPUs that have it.
    reads = zeros is not None or torch.cuda.get_device_capability(rows.device) >= (8, 9)
    if reads and len(rows) <= _KERNEL_ROWS and block_columns % _ALIGNMENT == 0:
        from headrace.backends.llm.model_runner.quantized_kernels import multiply_packed

        return multiply_packed(rows, values, scales, zeros, bits, block_rows, block_columns)
    return multiply_in_chunks(rows, PackedWeights(values, scales, (block_rows, block_columns), bits, zeros))


@cache
def _register() -> Any:
    """Register the product as one opaque operator, which torch.compile leaves alone: it depends on the number of rows."""
    operator = torch.library.custom_op(
        "headrace::multiply_quantized", _multiply_quantized, mutates_args=(), device_types="cuda"
    )
    operator.register_fake(_shape_of_result)
    return operator


def _shape_of_result(rows: torch.Tensor, values: torch.Tensor, *_others: Any) -> torch.Tensor:
    return rows.new_empty(len(rows), len(values))
