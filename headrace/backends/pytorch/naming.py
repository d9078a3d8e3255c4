# SPDX-License-Identifier: Apache-2.0
"""Which tensor of a configuration is which argument and which result of forward().

Called by `backends.pytorch.backend`. The rules are Triton's. For the inputs, and for the outputs by themselves:

    1. the names of forward()'s arguments, or the keys of the mapping it takes or returns
    2. INPUT__0, INPUT__1: any name with two underscores and the position
    3. any other names: the order of the configuration is that of forward()
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.backends.pytorch.calls import Argument, Call, Ports
from headrace.backends.signature import Port, Signature
from headrace.core.dtypes import DType
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig, SequenceBatching

_INDEXED = re.compile(r".*__([0-9]{1,4})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to call, and what to make of what comes back."""

    inputs: dict[str, DType | None]
    """The type of each declared input."""
    positional: tuple[str, ...]
    """The inputs that are handed over in this order."""
    keywords: tuple[tuple[str, str], ...]
    """Argument and input, for those behind an argument that is left to its default."""
    packed: str
    """"mapping" or "list" where forward() takes all inputs as one argument; else ""."""
    outputs: dict[str, DType | None]
    positions: dict[str, int] | None
    """Where each output is among the results; None: under its name."""


def plan_of(config: ModelConfig, call: Call) -> Plan:
    """Find the names of a configuration in a model."""
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
    """What the model takes and gives, under the configuration's names where there is a plan."""
    names_in = [port.name for port in ports.inputs]
    names_out = [port.name for port in ports.outputs]
    if plan is not None:
        names_in[: len(plan.positional)] = plan.positional
        for name, position in (plan.positions or {}).items():
            names_out[position] = name
    return Signature(_renamed(ports.inputs, names_in), _renamed(ports.outputs, names_out), {})


def declared_inputs(config: ModelConfig) -> dict[str, DType | None]:
    """All that the model gets, in the order of the configuration."""
    found: dict[str, DType | None] = {spec.name: spec.dtype for spec in config.inputs}
    if isinstance(config.scheduling, SequenceBatching):
        found |= {control.name: control.dtype for control in config.scheduling.controls}
        found |= {state.input_name: state.dtype for state in config.scheduling.states}
    found |= {name: batch.dtype for batch in config.batch_inputs for name in batch.target_names}
    return found


def declared_outputs(config: ModelConfig) -> dict[str, DType | None]:
    """All that the model is to give."""
    found: dict[str, DType | None] = {spec.name: spec.dtype for spec in config.outputs}
    if isinstance(config.scheduling, SequenceBatching):
        found |= {state.output_name: state.dtype for state in config.scheduling.states}
    return found


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
    found = [_INDEXED.fullmatch(name) for name in names]
    if all(found):
        places = {name: int(match.group(1)) for name, match in zip(names, found, strict=True) if match is not None}
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
