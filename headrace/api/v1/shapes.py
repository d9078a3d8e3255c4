# SPDX-License-Identifier: Apache-2.0
"""The shape and the size of an input, from what a request says of it and what the configuration says. For `decoding`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from headrace.api.v1.headers import HeaderInput
from headrace.core.dtypes import BYTES, DType
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import InputSpec, ModelConfig, fits


def dims_by_size(spec: InputSpec, dims: tuple[int, ...], dtype: DType, byte_size: int) -> tuple[int, ...]:
    """v0: the configuration's dimensions, of which the size may tell one that varies."""
    if dtype is BYTES and -1 not in dims:
        return dims
    known = prod(size for size in dims if size >= 0) * dtype.item_bytes
    varying = dims.count(-1)
    if not varying and byte_size != known:
        raise InvalidArgument(f"unexpected size {byte_size} for inference input '{spec.name}', expecting {known}")
    if varying > 1 or (varying and dtype is BYTES):
        raise InvalidArgument(
            f"the shape of inference input '{spec.name}' does not follow from its size: use a client of 0.11 or later, "
            "which sends dims"
        )
    if varying and (not known or byte_size % known):
        raise InvalidArgument(
            f"unexpected size {byte_size} for inference input '{spec.name}', expecting a multiple of {known}"
        )
    return tuple(byte_size // known if size < 0 else size for size in dims) if varying else dims


def dims_as_given(config: ModelConfig, spec: InputSpec, dims: tuple[int, ...], given: HeaderInput) -> tuple[int, ...]:
    """v1: the request's dimensions, or the configuration's where it has none."""
    if given.dims:
        if not fits(given.dims, dims) or min(given.dims) < 0:
            raise InvalidArgument(
                f"unexpected shape for input '{spec.name}' for model '{config.name}'. Expected {_listed(dims)}, got "
                f"{_listed(given.dims[:16])}"
            )
        return given.dims
    if -1 in dims:
        raise InvalidArgument(
            f"model supports variable-size for input '{spec.name}', request must specify input shape for model "
            f"'{config.name}'"
        )
    return dims


def size_as_given(config: ModelConfig, spec: InputSpec, given: HeaderInput, dtype: DType, count: int) -> int | None:
    """v1: bytes of the whole batch; None for strings that come without a size, which then are all there is."""
    if dtype is BYTES:
        if not given.batch_byte_size and given.region is None:
            raise InvalidArgument(
                f"batch-byte-size must be specified for input '{spec.name}' with non-fixed-size datatype for model "
                f"'{config.name}'"
            )
        return given.batch_byte_size or None
    expected = count * dtype.item_bytes
    if given.batch_byte_size not in (0, expected):
        raise InvalidArgument(
            f"specific batch-byte-size for input '{spec.name}' does not match expected byte-size calculated from shape and "
            f"datatype for model '{config.name}': {given.batch_byte_size}, expecting {expected}"
        )
    return expected


def _listed(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"
