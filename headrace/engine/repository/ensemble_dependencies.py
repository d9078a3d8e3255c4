# SPDX-License-Identifier: Apache-2.0
"""The models that ensembles use: wait for them, check that they fit, and follow their loads and unloads.

`DependencyTracker` implements `lifecycle.EnsembleDependencies` for `control`; it knows which ensemble waits for which model,
so two ensembles that use each other fail instead of waiting forever. `ensemble_problems` compares an ensemble's
configuration with those of its models; `check` calls it too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from headrace.core.dtypes import DType
from headrace.core.errors import InvalidArgument
from headrace.engine.repository.directory import Directory
from headrace.engine.repository.lifecycle import MissingDependency, ModelLifecycle
from headrace.models.config.types import EnsembleScheduling, EnsembleStep, InputSpec, ModelConfig, OutputSpec

StartLoad = Callable[[str], Awaitable[None]]
"""Start to load a model that an ensemble needs, if the repository has it."""


class DependencyTracker:
    """The dependencies of all ensembles."""

    def __init__(
        self, lifecycles: Mapping[str, ModelLifecycle], directory: Directory, start_load: StartLoad | None
    ) -> None:
        self._lifecycles = lifecycles
        self._directory = directory
        self._start_load = start_load
        self._waits: dict[str, str] = {}

    async def wait_for(self, name: str, steps: tuple[EnsembleStep, ...]) -> None:
        """Return when no model of the steps is being loaded; raise if ensembles wait for each other."""
        for step in steps:
            self._check_cycle(name, step.model_name)
            lifecycle = self._lifecycles.get(step.model_name)
            busy = lifecycle is not None and lifecycle.busy
            if self._start_load is not None and not busy and self._find(step) is None:
                await self._start_load(step.model_name)
        for step in steps:
            lifecycle = self._lifecycles.get(step.model_name)
            if lifecycle is not None and lifecycle.busy:
                self._check_cycle(name, step.model_name)
                self._waits[name] = step.model_name
                try:
                    await lifecycle.settled()
                finally:
                    del self._waits[name]

    def check(self, config: ModelConfig) -> None:
        """Raise `MissingDependency` if a step's model does not serve, `InvalidArgument` if its tensors do not match."""
        scheduling = config.scheduling
        if isinstance(scheduling, EnsembleScheduling):
            for step in scheduling.steps:
                problem = self._missing(config.name, step)
                if problem is not None:
                    raise problem
        problems = ensemble_problems(config, self._find)
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise InvalidArgument(problems[0] + more)

    def changed(self, name: str) -> None:
        """Reload or stop the ensembles that use a model which started or stopped serving."""
        for lifecycle in list(self._lifecycles.values()):
            if not lifecycle.desired.should_serve:
                continue
            problem = lifecycle.problem
            if (
                isinstance(problem, MissingDependency)
                and self._directory.find(problem.model, problem.version) is not None
            ):
                lifecycle.retry()
            elif lifecycle.serving:
                missing = [
                    p for p in (self._missing(lifecycle.name, step) for step in lifecycle.steps) if p is not None
                ]
                if missing:
                    lifecycle.stop_serving(missing[0])
                    self.changed(lifecycle.name)

    def _missing(self, ensemble: str, step: EnsembleStep) -> MissingDependency | None:
        if self._find(step) is not None:
            return None
        version = step_version(step)
        missing_model = f"'{step.model_name}' version {version}" if version else f"'{step.model_name}'"
        lifecycle = self._lifecycles.get(step.model_name)
        why = f": {lifecycle.problem.message}" if lifecycle is not None and lifecycle.problem is not None else ""
        text = f"ensemble '{ensemble}' depends on {missing_model} which has no loaded version{why}"
        return MissingDependency(text, step.model_name, version)

    def _find(self, step: EnsembleStep) -> ModelConfig | None:
        loaded = self._directory.find(step.model_name, step_version(step))
        return None if loaded is None else loaded.config

    def _check_cycle(self, name: str, other: str) -> None:
        path = [name, other]
        while path[-1] != name and path[-1] in self._waits:
            path.append(self._waits[path[-1]])
        if path[-1] == name:
            raise InvalidArgument(f"ensembles use each other in a circle: {' -> '.join(path)}")


Lookup = Callable[[EnsembleStep], ModelConfig | None]
"""Returns the configuration of the model that a step uses; None if it is not known."""

ENSEMBLE_CACHE = (
    "the responses of an ensemble are not cached, since they would outlive a change of its models: "
    "set response_cache in the models of its steps instead"
)


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a connection between steps: the model that produces or consumes a tensor, its type and shape."""

    owner: str
    dtype: DType | None
    shape: tuple[int, ...] | None


def step_version(step: EnsembleStep) -> str:
    """Return the version of a step, as `Directory.find` takes it."""
    return "" if step.model_version < 0 else str(step.model_version)


def ensemble_problems(config: ModelConfig, lookup: Lookup) -> list[str]:
    """Return where an ensemble does not match the models of its steps. Steps with an unknown model are skipped.

    The configuration's own check has verified that the steps form a graph from the inputs to the outputs.
    """
    scheduling = config.scheduling
    steps = scheduling.steps if isinstance(scheduling, EnsembleScheduling) else ()
    problems: list[str] = []
    produced = {spec.name: _end(config, spec, f"input of '{config.name}'") for spec in config.inputs}
    consumed = [(spec.name, _end(config, spec, f"output of '{config.name}'")) for spec in config.outputs]
    for step in steps:
        model = lookup(step)
        if model is None:
            continue
        problems += _step_problems(config, step, model)
        for spec in model.outputs:
            if spec.name in step.output_map:
                produced[step.output_map[spec.name]] = _end(model, spec, f"output '{spec.name}' of '{model.name}'")
        consumed += [
            (step.input_map[spec.name], _end(model, spec, f"input '{spec.name}' of '{model.name}'"))
            for spec in model.inputs
            if spec.name in step.input_map
        ]
    for tensor, consumer in consumed:
        if tensor in produced:
            problems += _mismatches(tensor, produced[tensor], consumer)
    return problems


def _step_problems(config: ModelConfig, step: EnsembleStep, model: ModelConfig) -> list[str]:
    """Return what is wrong with one step by itself."""
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


def _mismatches(tensor: str, producer: _End, consumer: _End) -> list[str]:
    problems = []
    between = f"tensor '{tensor}' is {{}} as {producer.owner} and {{}} as {consumer.owner}"
    if producer.dtype is not None and consumer.dtype is not None and producer.dtype is not consumer.dtype:
        problems.append(between.format(producer.dtype.name, consumer.dtype.name))
    if producer.shape is not None and consumer.shape is not None and not _fit(producer.shape, consumer.shape):
        problems.append(between.format(list(producer.shape), list(consumer.shape)))
    return problems


def _fit(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    return len(first) == len(second) and all(a == b or -1 in {a, b} for a, b in zip(first, second, strict=True))
