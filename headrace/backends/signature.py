# SPDX-License-Identifier: Apache-2.0
"""A model's inputs and outputs: check them against the configuration, or complete the configuration from them.

Every backend whose model files describe inputs and outputs reads them into a `Signature`. This module knows no
framework, files, threads or devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.backends.contract import Array
from headrace.core.dtypes import DType
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import Dims, InputSpec, ModelConfig, OutputSpec, SequenceBatching

DEFAULT_MAX_BATCH_SIZE = 64
"""The default for models that can batch and whose configuration has none. Triton's is 4.

A higher limit costs nothing: memory is allocated for the actual batch, not for the largest one.
"""


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of the model."""

    name: str
    kind: str
    """The framework's name of the data type."""
    dtype: DType | None
    """None: a type that a request cannot carry, such as a map."""
    shape: Dims | None
    """-1: any size. None: any shape, or a shape that the framework does not report (ONNX Runtime: also scalars)."""

    def takes(self, shape: Sequence[int]) -> bool:
        """Return whether an array of this shape fits."""
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            ours in (-1, size) for ours, size in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Signature:
    """All inputs and outputs, in the model's order."""

    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    optional: Mapping[str, Port]
    """Inputs with a default value, which a request may omit."""


class SignatureMismatch(InvalidArgument):
    """Raised when a declared input or output does not fit the model."""

    def __init__(self, message: str, side: str, tensor: str, field: str) -> None:
        super().__init__(message)
        self.side = side
        """"input" or "output"."""
        self.tensor = tensor
        """The name of the tensor; "" if the configuration lacks one."""
        self.field = field
        """The field of the tensor that is wrong: "name", "data_type" or "dims"."""


@dataclass(frozen=True, slots=True)
class _Declared:
    """A tensor as the configuration declares it. None: not checked."""

    name: str
    dtype: DType | None
    dims: Dims | None


def check_signature(config: ModelConfig, signature: Signature) -> None:
    """Reject a configuration that does not fit the model."""
    takes = {**signature.inputs, **signature.optional}
    declared = list(_declared_inputs(config))
    for tensor in declared:
        _check(config, tensor, takes, "input")
    missing = signature.inputs.keys() - {tensor.name for tensor in declared}
    if missing:
        names = ", ".join(f"'{name}'" for name in signature.inputs if name in missing)
        raise SignatureMismatch(
            f"model '{config.name}' needs inputs that its configuration does not name: {names}. Add them to `input`",
            "input",
            "",
            "",
        )
    for tensor in _declared_outputs(config):
        _check(config, tensor, signature.outputs, "output")


def is_declared(config: ModelConfig) -> bool:
    """Return whether the configuration has inputs and outputs, each with type and dims, so that no model file is needed."""
    specs: tuple[InputSpec | OutputSpec, ...] = (*config.inputs, *config.outputs)
    return bool(config.inputs and config.outputs) and all(spec.dtype is not None and spec.dims for spec in specs)


def completion(config: ModelConfig, signature: Signature) -> Any:
    """Return the inputs, outputs and batch size that the configuration omits, as a message."""
    # A stateful model declares its state under sequence batching; requests do not carry it.
    hidden = {tensor.name for tensor in (*_sequence_inputs(config), *_sequence_outputs(config))}
    hidden |= {name for batch in config.batch_inputs for name in batch.target_names}
    inputs = [port for port in signature.inputs.values() if port.name not in hidden]
    # Requests cannot carry maps and sequences, which scikit-learn's exporters add; leave them out.
    outputs = [port for port in signature.outputs.values() if port.name not in hidden and port.dtype is not None]
    batches = all(_is_dynamic(port) for port in (*inputs, *outputs))
    message = type(config.proto)()
    if config.max_batch_size > 0:
        if not batches:
            raise InvalidArgument(_cannot_batch(config, next(p for p in (*inputs, *outputs) if not _is_dynamic(p))))
    elif batches and not _declares_all_dimensions(config, signature):
        message.max_batch_size = DEFAULT_MAX_BATCH_SIZE
        if config.scheduling is None:
            message.dynamic_batching.SetInParent()
    batched = config.max_batch_size > 0 or message.max_batch_size > 0
    for port in inputs:
        _describe(config, message.input.add(), port, batched)
    for port in outputs:
        _describe(config, message.output.add(), port, batched)
    return message


def decode_text(name: str, array: Array) -> list[str]:
    """Return the elements of a BYTES input as text."""
    try:
        return [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel()]
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"input '{name}' has an element that is not UTF-8, which this model cannot take"
        ) from None


def _declared_inputs(config: ModelConfig) -> Iterator[_Declared]:
    for spec in config.inputs:
        # A ragged batch concatenates its requests: the model sees another rank.
        plain = not (spec.allow_ragged_batch or spec.is_shape_tensor)
        yield _Declared(spec.name, spec.dtype, (spec.dims if spec.reshape is None else spec.reshape) if plain else None)
    yield from _sequence_inputs(config)
    for batch in config.batch_inputs:
        yield from (_Declared(name, batch.dtype, None) for name in batch.target_names)


def _declared_outputs(config: ModelConfig) -> Iterator[_Declared]:
    ragged = {name for batch in config.batch_outputs for name in batch.target_names}
    for spec in config.outputs:
        plain = not (spec.name in ragged or spec.is_shape_tensor)
        yield _Declared(spec.name, spec.dtype, (spec.dims if spec.reshape is None else spec.reshape) if plain else None)
    yield from _sequence_outputs(config)


def _sequence_inputs(config: ModelConfig) -> Iterator[_Declared]:
    if isinstance(config.scheduling, SequenceBatching):
        for control in config.scheduling.controls:
            yield _Declared(control.name, control.dtype, None)
        for state in config.scheduling.states:
            yield _Declared(state.input_name, state.dtype, state.dims)


def _sequence_outputs(config: ModelConfig) -> Iterator[_Declared]:
    if isinstance(config.scheduling, SequenceBatching):
        for state in config.scheduling.states:
            yield _Declared(state.output_name, state.dtype, state.dims)


def _check(config: ModelConfig, tensor: _Declared, ports: Mapping[str, Port], side: str) -> None:
    port = ports.get(tensor.name)
    if port is None:
        raise SignatureMismatch(
            f"unexpected inference {side} '{tensor.name}', allowed {side}s are: {', '.join(ports)} "
            f"(configuration of model '{config.name}')",
            side,
            tensor.name,
            "name",
        )
    if port.dtype is None:
        raise InvalidArgument(
            f"{side} '{port.name}' of model '{config.name}' is a {port.kind}, which no request can carry: "
            "export the model without it, or leave it out of the configuration"
        )
    if tensor.dtype is not None and tensor.dtype is not port.dtype:
        raise SignatureMismatch(
            f"{side} '{port.name}' of model '{config.name}' is {tensor.dtype.name} in the configuration and "
            f"{port.dtype.name} in the model: write data_type: {port.dtype.config_name}",
            side,
            port.name,
            "data_type",
        )
    if tensor.dims is None or port.shape is None:
        return
    batched = config.max_batch_size > 0
    if batched and not _is_dynamic(port):
        raise InvalidArgument(_cannot_batch(config, port))
    full = (-1, *tensor.dims) if batched else tensor.dims
    # An open input dimension would admit requests that the model rejects; an output dimension may be open.
    fits = len(full) == len(port.shape) and all(
        theirs in (-1, ours) or (ours == -1 and side == "output") for ours, theirs in zip(full, port.shape, strict=True)
    )
    if not fits:
        first = " (its first dimension is the batch, because max_batch_size is over 0)" if batched else ""
        raise SignatureMismatch(
            f"{side} '{port.name}' of model '{config.name}' has shape {list(full)} by the configuration{first} and "
            f"{list(port.shape)} in the model: correct its dims",
            side,
            port.name,
            "dims",
        )


def _is_dynamic(port: Port) -> bool:
    return port.shape is not None and port.shape[:1] == (-1,)


def _cannot_batch(config: ModelConfig, port: Port) -> str:
    return (
        f"model '{config.name}' does not support batching: tensor '{port.name}' has shape {list(port.shape or ())}, and "
        "batching needs a first dimension of any size (-1) in each. Set max_batch_size: 0 and give all dimensions in "
        "dims, or export the model with a dynamic first dimension"
    )


def _declares_all_dimensions(config: ModelConfig, signature: Signature) -> bool:
    """Return whether a tensor is declared with as many dimensions as the model has: then none of them is the batch."""
    ports = {**signature.inputs, **signature.outputs}
    specs: tuple[InputSpec | OutputSpec, ...] = (*config.inputs, *config.outputs)
    return any(
        bool(spec.dims) and len(spec.dims or ()) == len(ports[spec.name].shape or ())
        for spec in specs
        if spec.name in ports
    )


def _describe(config: ModelConfig, message: Any, port: Port, batched: bool) -> None:
    if port.dtype is None:
        raise InvalidArgument(
            f"input '{port.name}' of model '{config.name}' is a {port.kind}, which no request can carry: "
            "export the model with tensors as inputs"
        )
    message.name = port.name
    message.data_type = port.dtype.config_number
    sizes = (port.shape or ())[1:] if batched else port.shape or ()
    message.dims.extend(sizes or (1,))
    if not sizes:
        # A configuration must have dims; the reshape removes the 1 before the model sees it.
        message.reshape.SetInParent()
