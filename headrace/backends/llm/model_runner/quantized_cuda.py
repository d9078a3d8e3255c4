# SPDX-License-Identifier: Apache-2.0
"""Products with quantised weights on a GPU: our kernels for few rows, PyTorch's FP8 product, else dequantised weights.

`tests/backends/llm/test_llm_quantised_cuda.py` compares each way with dequantised weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from headrace.backends.llm.model_runner.packed_weights import FP8_MAX, PackedWeights, multiply_in_chunks
from headrace.backends.torch_import import run_once

_KERNEL_ROWS, _FP8_KERNEL_ROWS = 64, 128
"""Up to so many rows our kernels are faster; beyond, dequantised weights and cuBLAS, or PyTorch's FP8 product."""
_ALIGNMENT = 16
"""PyTorch's FP8 product needs sizes that are multiples of this; the kernels, groups that are."""


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
    """Return the product of FP8 weights with a scale for each output, and rows that are made FP8 with a scale for each.

    A single row is not made FP8: its product is as fast without.
    """
    if len(rows) == 1:
        return multiply(rows, values, scales, None, (1, rows.shape[1]))
    row_scales = (rows.abs().amax(dim=1, keepdim=True).float() / FP8_MAX).clamp(min=1e-12)
    quantized = (rows.float() / row_scales).clamp(-FP8_MAX, FP8_MAX).to(values.dtype)
    product: torch.Tensor = torch.ops.headrace.multiply_fp8(quantized, row_scales, values, scales)
    return product.to(rows.dtype)


def _has_fp8_product(device: torch.device) -> bool:
    """Return whether PyTorch multiplies FP8 with a scale for each row on this GPU."""
    ones = torch.ones(32, 1, device=device)
    weights = torch.ones(32, 32, device=device).to(torch.float8_e4m3fn)
    try:
        return bool(_scaled_product(weights, ones, weights, ones).isfinite().all())
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
    # Triton reads FP8 on GPUs that have it, and 4-bit weights as words.
    reads = zeros is not None or torch.cuda.get_device_capability(rows.device) >= (8, 9)
    if not reads or block_columns % _ALIGNMENT:
        return multiply_in_chunks(rows, PackedWeights(values, scales, (block_rows, block_columns), bits, zeros))
    from headrace.backends.llm.model_runner.quantized_kernels import dequantize, multiply_packed

    if len(rows) <= _KERNEL_ROWS:
        return multiply_packed(rows, values, scales, zeros, bits, block_rows, block_columns)
    return rows @ dequantize(values, scales, zeros, bits, block_rows, block_columns, rows.dtype).t()


def _multiply_fp8(
    rows: torch.Tensor, row_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    if len(rows) <= _FP8_KERNEL_ROWS:
        from headrace.backends.llm.model_runner.quantized_kernels import multiply_fp8

        return multiply_fp8(rows, row_scales, values, scales, torch.bfloat16)
    return _scaled_product(rows, row_scales, values, scales)


def _scaled_product(
    rows: torch.Tensor, row_scales: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    return torch._scaled_mm(rows, values.t(), row_scales, scales.t(), out_dtype=torch.bfloat16)


@run_once
def _register() -> tuple[Any, Any]:
    """Register the products as opaque operators, which torch.compile leaves alone: they depend on the number of rows."""
    operators = []
    for function, shape in ((_multiply_quantized, _shape_of_result), (_multiply_fp8, _shape_of_fp8_result)):
        name = f"headrace::{function.__name__.removeprefix('_')}"
        operators.append(torch.library.custom_op(name, function, mutates_args=(), device_types="cuda"))
        operators[-1].register_fake(shape)
    return operators[0], operators[1]


def _shape_of_result(rows: torch.Tensor, values: torch.Tensor, *_others: Any) -> torch.Tensor:
    return rows.new_empty(len(rows), len(values))


def _shape_of_fp8_result(
    rows: torch.Tensor, _row_scales: torch.Tensor, values: torch.Tensor, _scales: torch.Tensor
) -> torch.Tensor:
    return rows.new_empty(len(rows), len(values), dtype=torch.bfloat16)
