# SPDX-License-Identifier: Apache-2.0
"""Whether the steps of an ensemble fit together and fit the models they name.

Called before an ensemble is loaded and by `check`. Turns configurations into a list of what is wrong; loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.dtypes import DType
from headrace.models.config.types import EnsembleScheduling, EnsembleStep, InputSpec, ModelConfig, OutputSpec

Lookup = Callable[[EnsembleStep], ModelConfig | None]
"""The configuration of the model that a step uses; None when it is not known."""

ENSEMBLE_CACHE = (
    "the answers of an ensemble are not kept, since they would outlive a change of its models: "
    "write response_cache in the models of its steps instead"
)


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a connection: who gives or takes a tensor, and what they say it is."""

    owner: str
    dtype: DType | None
    shape: tuple[int, ...] | None


def step_version(step: EnsembleStep) -> str:
    """The version a step asks for, as `Directory.find` takes it."""
    return "" if step.model_version < 0 else str(step.model_version)


def ensemble_problems(config: ModelConfig, lookup: Lookup) -> list[str]:
    """Where an ensemble does not fit the models of its steps. Steps whose model is not known are left out.

    That the steps make a graph from its inputs to its outputs has been checked with its configuration.
    """
    scheduling = config.scheduling
    steps = scheduling.steps if isinstance(scheduling, EnsembleScheduling) else ()
    problems: list[str] = []
    given = {spec.name: _end(config, spec, f"input of '{config.name}'") for spec in config.inputs}
    taken = [(spec.name, _end(config, spec, f"output of '{config.name}'")) for spec in config.outputs]
    for step in steps:
        model = lookup(step)
        if model is None:
            continue
        problems += _step_problems(config, step, model)
        for spec in model.outputs:
            if spec.name in step.output_map:
                given[step.output_map[spec.name]] = _end(model, spec, f"output '{spec.name}' of '{model.name}'")
        taken += [
            (step.input_map[spec.name], _end(model, spec, f"input '{spec.name}' of '{model.name}'"))
            for spec in model.inputs
            if spec.name in step.input_map
        ]
    for tensor, taker in taken:
        if tensor in given:
            problems += _misfits(tensor, given[tensor], taker)
    return problems


def _step_problems(config: ModelConfig, step: EnsembleStep, model: ModelConfig) -> list[str]:
    """What is wrong with one step by itself."""
    inputs = {spec.name for spec in model.inputs}
    outputs = {spec.name for spec in model.outputs}
    texts = [
        f"input_map names '{name}', but {_has(model, 'input', inputs)}"
        for name in sorted(step.input_map.keys() - inputs)
    ]
    texts += [
        f"output_map names '{name}', but {_has(model, 'output', outputs)}"
        for name in sorted(step.output_map.keys() - outputs)
    ]
    texts += [
        f"its input '{spec.name}' is not in the input_map"
        for spec in model.inputs
        if not spec.optional and spec.name not in step.input_map
    ]
    problems = [f"step '{model.name}': {text}" for text in texts]
    if 0 < model.max_batch_size < config.max_batch_size:
        problems.append(
            f"ensemble '{config.name}' allows maximum batch size {config.max_batch_size}, but it contains model "
            f"'{model.name}' which only allows maximum batch size to be {model.max_batch_size}"
        )
    return problems


def _has(model: ModelConfig, what: str, names: set[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in sorted(names)) or "none"
    return f"model '{model.name}' has no such {what}; it has {listed}"


def _end(model: ModelConfig, spec: InputSpec | OutputSpec, owner: str) -> _End:
    batch = (-1,) if model.max_batch_size > 0 else ()
    return _End(owner, spec.dtype, None if spec.dims is None else batch + spec.dims)


def _misfits(tensor: str, giver: _End, taker: _End) -> list[str]:
    problems = []
    between = f"tensor '{tensor}' is {{}} as {giver.owner} and {{}} as {taker.owner}"
    if giver.dtype is not None and taker.dtype is not None and giver.dtype is not taker.dtype:
        problems.append(between.format(giver.dtype.name, taker.dtype.name))
    if giver.shape is not None and taker.shape is not None and not _fit(giver.shape, taker.shape):
        problems.append(between.format(list(giver.shape), list(taker.shape)))
    return problems


def _fit(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in {a, b} for a, b in zip(one, other, strict=True))
