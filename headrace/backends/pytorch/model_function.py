# SPDX-License-Identifier: Apache-2.0
"""A loaded PyTorch model as a function of tensors, and the mapping of configured names to its arguments and results."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from headrace.backends.device_array import DTYPES
from headrace.backends.signature import Port, Signature
from headrace.core.dtypes import DType
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig, SequenceBatching

_NUMBERS: dict[Any, int] = {
    torch.bool: 12,
    torch.uint8: 1,
    torch.uint16: 28,
    torch.uint32: 34,
    torch.uint64: 35,
    torch.int8: 2,
    torch.int16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 13,
}
"""The numbers of `torch._export.serde.schema.ScalarType`."""
DTYPES_BY_NUMBER = {number: DTYPES[dtype] for dtype, number in _NUMBERS.items()}
TORCH_BY_NUMBER: dict[int, Any] = {
    **{number: dtype for dtype, number in _NUMBERS.items()},
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
}


ArgumentKind = Literal["tensor", "strings", "mapping", "list", "fixed"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of forward()."""

    name: str
    """"" if the file does not have it."""
    kind: str = "tensor"
    """An `ArgumentKind`: a tensor, a List[str], a Dict[str, Tensor], a List[Tensor], or a type that no request can carry."""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Outputs:
    """What forward() returns."""

    count: int | None
    """None: unknown."""
    names: tuple[str, ...] | None = None
    """The keys, if the program returns a mapping: it then returns the values in this order."""
    mapping: bool = False
    """Whether it returns a mapping from names to tensors."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Types and shapes in forward()'s order, as far as the file has them."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed sizes of an input's dimension."""

    argument: int
    axis: int
    symbol: str
    lowest: int
    highest: int | None


def most_rows(ranges: Sequence[Range]) -> int | None:
    """Return the largest batch size; None: unlimited."""
    return min((limit.highest for limit in ranges if limit.axis == 0 and limit.highest is not None), default=None)


@dataclass(frozen=True, slots=True)
class Call:
    """A callable model on one device."""

    function: Callable[..., Any]
    arguments: Sequence[Argument]
    outputs: Outputs
    signature: Ports | None
    """None: the file does not have it."""
    ranges: tuple[Range, ...] = ()
    writes_inputs: bool = False
    """It modifies its inputs in place."""
    writes_itself: bool = False
    """It keeps state between calls, so that instances cannot share it."""
    scripted: bool = False
    """TorchScript's executor runs it."""
    release: Callable[[], None] | None = None
    """Frees the weights at once; dropping the function would leave them to the garbage collector."""
    weights: Sequence[Any] | None = None
    """Its parameters and buffers, in the order of the file; None if they cannot be reached."""


_INDEXED = re.compile(r".*__([0-9]{1,4})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to pass inputs to a model and find its outputs."""

    inputs: dict[str, DType | None]
    """The data type of each declared input."""
    positional: tuple[str, ...]
    """The inputs passed by position, in this order."""
    keywords: tuple[tuple[str, str], ...]
    """Pairs of argument and input, for arguments after one that keeps its default."""
    packed: str
    """"mapping" or "list" if forward() takes all inputs as one argument, else ""."""
    outputs: dict[str, DType | None]
    positions: dict[str, int] | None
    """The position of each output among the results; None: by name."""


def plan_of(config: ModelConfig, call: Call) -> Plan:
    """Match the names of a configuration to a model's arguments and results."""
    inputs, outputs = declared_inputs(config), declared_outputs(config)
    arguments = [argument for argument in call.arguments if argument.kind != "fixed"]
    packed = arguments[0].kind if len(arguments) == 1 and arguments[0].kind in ("mapping", "list") else ""
    keywords: tuple[tuple[str, str], ...] = ()
    if packed == "mapping":
        positional = tuple(inputs)
    elif packed == "list":
        places = _places(config, list(inputs), [], len(inputs), "input")
        positional = tuple(sorted(inputs, key=places.__getitem__))
    else:
        positional, keywords = _arguments(config, list(inputs), call.arguments)
    positions = None
    if not call.outputs.mapping:
        known = call.outputs.names or ()
        positions = _places(config, list(outputs), known, call.outputs.count, "output")
    return Plan(inputs, positional, keywords, packed, outputs, positions)


def signature_of(ports: Ports, plan: Plan | None = None) -> Signature:
    """Return the model's signature, under the configuration's names if there is a plan."""
    names_in = [port.name for port in ports.inputs]
    names_out = [port.name for port in ports.outputs]
    if plan is not None:
        names_in[: len(plan.positional)] = plan.positional
        for name, position in (plan.positions or {}).items():
            names_out[position] = name
    return Signature(_renamed(ports.inputs, names_in), _renamed(ports.outputs, names_out), {})


def declared_inputs(config: ModelConfig) -> dict[str, DType | None]:
    """Return all inputs of the model, in the configuration's order."""
    declared: dict[str, DType | None] = {spec.name: spec.dtype for spec in config.inputs}
    if isinstance(config.scheduling, SequenceBatching):
        declared |= {control.name: control.dtype for control in config.scheduling.controls}
        declared |= {state.input_name: state.dtype for state in config.scheduling.states}
    declared |= {name: batch.dtype for batch in config.batch_inputs for name in batch.target_names}
    return declared


def declared_outputs(config: ModelConfig) -> dict[str, DType | None]:
    """Return all outputs of the model."""
    declared: dict[str, DType | None] = {spec.name: spec.dtype for spec in config.outputs}
    if isinstance(config.scheduling, SequenceBatching):
        declared |= {state.output_name: state.dtype for state in config.scheduling.states}
    return declared


def _renamed(ports: Sequence[Port], names: Sequence[str]) -> dict[str, Port]:
    return {name: replace(port, name=name) for port, name in zip(ports, names, strict=True)}


def _arguments(
    config: ModelConfig, names: list[str], arguments: Sequence[Argument]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    takes = [argument for argument in arguments if argument.kind != "fixed"]
    places = _places(config, names, [argument.name for argument in takes], len(takes), "input")
    by_argument = {takes[place].name or str(place): name for name, place in places.items()}
    positional: list[str] = []
    keywords: list[tuple[str, str]] = []
    gap = False
    for index, argument in enumerate(arguments):
        name = by_argument.get(argument.name or str(index))
        if name is None:
            if not argument.optional:
                raise InvalidArgument(
                    f"model '{config.name}' needs an input for {_called(index, argument)}, which its configuration does not "
                    "name: add it to `input`"
                )
            gap = True
        elif gap:
            keywords.append((argument.name, name))
        else:
            positional.append(name)
    return tuple(positional), tuple(keywords)


def _called(index: int, argument: Argument) -> str:
    return f"argument '{argument.name}' of forward()" if argument.name else f"argument {index} of forward()"


def _places(
    config: ModelConfig, names: list[str], known: Sequence[str], count: int | None, side: str
) -> dict[str, int]:
    if names and all(name in known for name in names):
        return {name: list(known).index(name) for name in names}
    matches = [_INDEXED.fullmatch(name) for name in names]
    if all(matches):
        places = {name: int(match.group(1)) for name, match in zip(names, matches, strict=True) if match is not None}
    else:
        places = {name: index for index, name in enumerate(names)}
    highest = max(places.values(), default=-1)
    if len(set(places.values())) != len(places) or (count is not None and highest >= count):
        has = f"{count} {side}{'' if count == 1 else 's'}" + (f" ({', '.join(known)})" if any(known) else "")
        raise InvalidArgument(
            f"model '{config.name}' has {has if count is not None else f'other {side}s'}, and its configuration names "
            f"{', '.join(names)}: use the names of forward(), or {side.upper()}__0 and so on, each once"
        )
    return places
