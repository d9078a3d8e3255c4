# SPDX-License-Identifier: Apache-2.0
"""Turn the tensors that checkpoints store for quantised layers into `PackedWeights`, and find damaged ones.

The formats are those of AWQ's gemm kernels, GPTQ's two checkpoint formats and compressed-tensors; FP8 is the same in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from headrace.backends.llm.model_runner.packed_weights import PackedWeights
from headrace.backends.llm.quantization.checkpoint import StoredLayer
from headrace.core.errors import FailedPrecondition

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the 4-bit values of a word are, by column: AWQ's kernels need them interleaved."""
_FP8_NAN = 0x7F

Tensors = Mapping[str, torch.Tensor]


def repack(name: str, layer: StoredLayer, tensors: Tensors) -> PackedWeights:
    """Return the weights of a layer. Raises FailedPrecondition if its tensors are damaged."""
    storage = layer.scheme.storage
    if storage == "fp8":
        weights = _fp8(layer, tensors)
    elif storage == "packed":
        weights = _compressed(name, layer, tensors)
    else:
        weights = _columns(name, layer, tensors)
    check_values(name, weights)
    return weights


def _fp8(layer: StoredLayer, tensors: Tensors) -> PackedWeights:
    scales = next(tensor for last, tensor in tensors.items() if "scale" in last).float()
    if block := layer.scheme.block:
        return PackedWeights(
            tensors["weight"], scales.reshape(-(-layer.outputs // block[0]), -(-layer.inputs // block[1])), block
        )
    scales = scales.reshape(-1, 1).expand(layer.outputs, 1).contiguous()
    return PackedWeights(tensors["weight"], scales, (1, layer.inputs))


def _compressed(name: str, layer: StoredLayer, tensors: Tensors) -> PackedWeights:
    bits = layer.scheme.bits
    if tensors["weight_shape"].tolist() != [layer.outputs, layer.inputs]:
        raise _damaged(name, "weight_shape", f"is {tensors['weight_shape'].tolist()}")
    scales = tensors["weight_scale"].float()
    if layer.scheme.has_zeros:
        # Packed along the outputs.
        zeros = _unpack(tensors["weight_zero_point"].t(), bits)[:, : layer.outputs].t().contiguous()
    else:
        zeros = torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)
    words = tensors["weight_packed"].contiguous()
    return _integers(name, layer, words, scales, zeros, tensors.get("weight_g_idx"))


def _columns(name: str, layer: StoredLayer, tensors: Tensors) -> PackedWeights:
    bits = layer.scheme.bits
    zeros = _unpack(tensors["qzeros"], bits)
    if layer.scheme.storage == "awq":
        zeros = zeros.view(len(zeros), -1, 8)[:, :, torch.tensor(_AWQ_ORDER)].flatten(1)
        packed = _awq_weights(tensors["qweight"])
    else:
        # Packed along the inputs, as ours: a transposition of whole words is enough.
        packed = tensors["qweight"].t().contiguous()
        zeros = (zeros + layer.scheme.zero_offset) & ((1 << bits) - 1)
    scales = tensors["scales"].float().t().contiguous()
    return _integers(name, layer, packed, scales, zeros.t().contiguous(), tensors.get("g_idx"))


def _awq_weights(qweight: torch.Tensor) -> torch.Tensor:
    """Return bytes `[outputs, inputs / 2]` of words `[inputs, outputs / 8]`."""
    words = qweight.t().contiguous()
    packed = torch.empty(len(words), 8, words.shape[1] // 2, dtype=torch.uint8)
    for column, place in enumerate(_AWQ_ORDER):
        values = (words >> (4 * place)).to(torch.uint8).bitwise_and_(15)
        packed[:, column] = _pack(values, 4)
    return packed.flatten(0, 1)


def _integers(
    name: str,
    layer: StoredLayer,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups_of_inputs: torch.Tensor | None,
) -> PackedWeights:
    size, bits = layer.inputs // layer.groups, layer.scheme.bits
    values = packed if packed.dtype == torch.uint8 else packed.view(torch.uint8)
    order = None
    if groups_of_inputs is not None:
        groups_of_inputs = groups_of_inputs.long()
        inside = (groups_of_inputs >= 0) & (groups_of_inputs < layer.groups)
        if not inside.all() or (groups_of_inputs.bincount(minlength=layer.groups) != size).any():
            raise _damaged(name, "g_idx", f"does not have {size} inputs in each of {layer.groups} groups")
        order = groups_of_inputs.argsort(stable=True)
        if torch.equal(order, torch.arange(layer.inputs)):
            order = None
        else:
            columns = _unpack(values, bits) if bits == 4 else values
            values = _pack(columns[:, order], bits)
    return PackedWeights(values.contiguous(), scales, (1, size), bits, zeros, order)


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values of the last dimension as bytes; the lowest bits of a word, or byte, are the first."""
    packed = words.contiguous().view(torch.uint8)
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return bytes with the values, for `PackedWeights`."""
    if bits == 8:
        return values.contiguous()
    return values[:, ::2] | (values[:, 1::2] << 4)


def check_values(name: str, weights: PackedWeights) -> None:
    """Raise FailedPrecondition for values that cannot be those of a whole checkpoint."""
    scales = weights.scales
    if not scales.isfinite().all():
        raise _damaged(name, "scale", "has values that are not finite")
    if weights.zeros is None and ((weights.values.view(torch.uint8) & 0x7F) == _FP8_NAN).any():
        raise _damaged(name, "weight", "has values that are no numbers")
    unscaled = scales == 0
    if unscaled.any():
        # Harmless where all weights are zero.
        only_unscaled = replace(weights, scales=unscaled.float())
        if only_unscaled.dequantize(0, len(weights.values)).any():
            raise _damaged(name, "scale", "has zeros for weights that are not zero")


def _damaged(name: str, tensor: str, what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"the {tensor} of the quantised layer '{name[:128]}' {what}: the weights are damaged; copy the model again"
    )
