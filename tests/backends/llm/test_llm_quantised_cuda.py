# SPDX-License-Identifier: Apache-2.0
"""Products with quantised weights on a GPU, where there is one. Needs nothing but PyTorch: it runs on a bare machine.

`python -m pytest -p no:cacheprovider --noconftest tests/backends/llm/test_llm_quantised_cuda.py`
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headrace.backends.llm.model_runner import quantized_cuda
from headrace.backends.llm.model_runner.packed_weights import PackedWeights, multiply_in_chunks, to_fp8
from headrace.backends.llm.model_runner.quantized_linear import QuantizedLinear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

ROWS = (1, 2, 7, 16, 33, 64, 65, 128, 129, 300)
"""On both sides of what the kernels compute."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_integers(outputs: int, inputs: int, group: int, bits: int) -> PackedWeights:
    values = torch.randint(0, 256, (outputs, inputs * bits // 8), dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (outputs, inputs // group), dtype=torch.uint8)
    return PackedWeights(values, torch.rand(outputs, inputs // group) / 16, (1, group), bits, zeros)


def random_blocks(outputs: int, inputs: int, rows: int, columns: int) -> PackedWeights:
    values = torch.randn(outputs, inputs).mul(50).to(torch.float8_e4m3fn)
    return PackedWeights(values, torch.rand(-(-outputs // rows), -(-inputs // columns)) / 64, (rows, columns))


WEIGHTS: dict[str, Any] = {
    "int4": lambda: random_integers(512, 1024, 128, 4),
    "int4, many outputs and inputs": lambda: random_integers(16400, 4224, 128, 4),
    "int4 in small groups": lambda: random_integers(96, 192, 32, 4),
    "int4 per channel": lambda: random_integers(130, 352, 352, 4),
    "int4 in groups that the kernel does not take": lambda: random_integers(64, 120, 24, 4),
    "int8": lambda: random_integers(256, 512, 64, 8),
    "fp8 in blocks": lambda: random_blocks(512, 1024, 128, 128),
    "fp8 in blocks that are not whole": lambda: random_blocks(200, 336, 128, 128),
    "fp8 per output, sizes that are no multiples of 16": lambda: to_fp8(torch.randn(50, 72)),
    "fp8 per output": lambda: to_fp8(torch.randn(512, 1024)),
    "fp8 per output, many outputs": lambda: to_fp8(torch.randn(16400, 1040)),
}


def on_gpu(weights: PackedWeights, bias: torch.Tensor | None = None) -> QuantizedLinear:
    inputs = weights.values.shape[1] * 8 // weights.bits
    parameter = None if bias is None else nn.Parameter(bias, requires_grad=False)
    layer = QuantizedLinear(weights, parameter, len(weights.values), inputs)
    device = torch.device("cuda", 0)
    quantized_cuda.prepare([layer], device)
    return layer.to(device)


def expected(weights: PackedWeights, rows: torch.Tensor) -> torch.Tensor:
    return multiply_in_chunks(rows.float(), weights)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, *, fp8_rows: bool) -> None:
    assert found.dtype is dtype
    found = found.float().cpu()
    assert found.isfinite().all()
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    # The FP8 product also rounds the rows to FP8.
    assert worst < (0.08 if fp8_rows else {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_way_is_near_dequantised_weights(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weights = WEIGHTS[name]()
    layer = on_gpu(weights)
    for count in ROWS:
        rows = torch.randn(count, layer.in_features).to(dtype)
        assert_near(layer(rows.cuda()), expected(weights, rows), dtype, fp8_rows=layer.fp8_product)


def test_a_bias_an_order_of_inputs_and_a_batch() -> None:
    torch.manual_seed(2)
    weights, bias, order = random_integers(64, 256, 64, 4), torch.randn(64), torch.randperm(256)
    ordered = PackedWeights(weights.values, weights.scales, weights.block, 4, weights.zeros, order)
    rows = torch.randn(2, 3, 256)
    found = on_gpu(ordered, bias)(rows.cuda())
    wanted = expected(weights, rows.view(6, 256)[:, order]) + bias
    assert_near(found.view(6, 64), wanted, torch.float32, fp8_rows=False)


def test_new_gpus_use_the_fp8_product() -> None:
    if torch.cuda.get_device_capability() >= (9, 0):
        assert on_gpu(WEIGHTS["fp8 per output"]()).fp8_product
    assert not on_gpu(WEIGHTS["fp8 in blocks"]()).fp8_product


@pytest.mark.parametrize("name", ["int4", "fp8 in blocks", "fp8 per output"])
def test_products_can_be_captured_and_compiled(name: str) -> None:
    torch.manual_seed(3)
    weights = WEIGHTS[name]()
    layer = on_gpu(weights).requires_grad_(False)
    rows = torch.randn(8, layer.in_features, device="cuda", dtype=torch.bfloat16)
    layer(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        captured = layer(rows)
    rows.copy_(torch.randn_like(rows))
    graph.replay()
    assert_near(captured, expected(weights, rows.cpu()), torch.bfloat16, fp8_rows=layer.fp8_product)
    compiled = torch.compile(layer, dynamic=True)
    with torch.inference_mode():
        assert_near(compiled(rows), expected(weights, rows.cpu()), torch.bfloat16, fp8_rows=layer.fp8_product)
