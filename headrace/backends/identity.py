# SPDX-License-Identifier: Apache-2.0
"""The backend `identity`: outputs are the inputs, in order. For first steps, tests and benchmarks.

It needs no model file. Its parameters:

    first                return only the first elements of each row: a large request, a small response
    sleep_milliseconds   wait before responding, like a model on another device
    busy_milliseconds    compute before responding, like a model on this core
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

_MAX_MILLISECONDS = 3_600_000


class IdentityBackend:
    """`backend: "identity"`."""

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return None: there is no model file."""
        return None

    def usable_gpus(self, present: int) -> int:
        """Return all GPUs: an instance may be placed on a GPU but does not use it."""
        return present

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> IdentityModel:
        """Load a version; reject a configuration whose outputs do not match its inputs."""
        if not config.inputs or len(config.inputs) != len(config.outputs):
            raise InvalidArgument(
                f"model '{config.name}' has {len(config.inputs)} inputs and {len(config.outputs)} outputs: "
                "the identity backend gives each input back, so declare as many outputs as inputs, at least one"
            )
        for input_spec, output_spec in zip(config.inputs, config.outputs, strict=True):
            if input_spec.dtype is not output_spec.dtype:
                raise InvalidArgument(
                    f"output '{output_spec.name}' of model '{config.name}' must have the data type of input "
                    f"'{input_spec.name}', which it gives back"
                )
        return IdentityModel(config)


class IdentityModel:
    """One version of an identity model."""

    def __init__(self, config: ModelConfig) -> None:
        self._sources = {
            output_spec.name: input_spec.name
            for input_spec, output_spec in zip(config.inputs, config.outputs, strict=True)
        }
        self._batches = config.max_batch_size > 0
        self._first = int(_number(config, "first", 1 << 40))
        self._sleep_seconds = _number(config, "sleep_milliseconds", _MAX_MILLISECONDS) / 1000
        self._busy_seconds = _number(config, "busy_milliseconds", _MAX_MILLISECONDS) / 1000

    def open(self, placement: Placement) -> IdentityInstance:
        """Create an instance; it holds no resources."""
        return IdentityInstance(self._sources, self._batches, self._first, self._sleep_seconds, self._busy_seconds)

    def close(self) -> None:
        """Do nothing: instances share nothing."""


class IdentityInstance:
    """One execution context."""

    def __init__(
        self, sources: Mapping[str, str], batches: bool, first: int, sleep_seconds: float, busy_seconds: float
    ) -> None:
        self._sources = sources
        self._batches = batches
        self._first = first
        self._sleep_seconds = sleep_seconds
        self._busy_seconds = busy_seconds
        self._plain: tuple[str, str] | None = None
        """The fast path: one output, one input and no parameters. Benchmarks measure the rest of the server with it."""
        if len(sources) == 1 and not (first or sleep_seconds or busy_seconds):
            self._plain = next(iter(sources.items()))

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Return the inputs without a copy."""
        if self._plain is not None:
            taken, given_name = self._plain
            return {taken: inputs[given_name]}
        if self._sleep_seconds:
            time.sleep(self._sleep_seconds)
        if self._busy_seconds:
            end = time.thread_time() + self._busy_seconds
            while time.thread_time() < end:
                pass
        sources = self._sources
        for name in requested:
            if sources[name] not in inputs:
                raise InvalidArgument(
                    f"output '{name}' gives back input '{sources[name]}', which this request left out: "
                    "give it, or ask for other outputs"
                )
        given = {name: inputs[sources[name]] for name in requested}
        if not self._first:
            return given
        return {name: self._cut(array) for name, array in given.items()}

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

    def _cut(self, array: Array) -> Array:
        # Computed here, since numpy cannot infer -1 next to an empty batch.
        if not self._batches:
            return array.reshape(array.size)[: self._first]
        row = 1
        for size in array.shape[1:]:
            row *= size
        return array.reshape(array.shape[0], row)[:, : self._first]


def _number(config: ModelConfig, key: str, highest: int) -> float:
    text = config.parameters.get(key, "0")
    try:
        number = float(text)
    except ValueError:
        number = -1
    # NaN also fails this comparison.
    if not 0 <= number <= highest:
        raise InvalidArgument(f"parameter {key} of model '{config.name}' is '{text[:32]}': use 0 to {highest}")
    return number
