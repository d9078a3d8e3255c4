# SPDX-License-Identifier: Apache-2.0
"""A model without a model: its outputs are its inputs, in order. For first looks, for tests and for measuring.

Called by the engine through `backends.contract`. Needs no file. Its parameters:

    first                gives only the first so many elements of each row: a large request, a small answer
    sleep_milliseconds   waits before it answers, as a model on another device would
    busy_milliseconds    computes before it answers, as a model on this core would
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

_LONGEST_MILLISECONDS = 3_600_000


class IdentityBackend:
    """`backend: "identity"`."""

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """There is no file that could tell anything."""
        return None

    def usable_gpus(self, present: int) -> int:
        """All: nothing is done there, but an instance may be said to stand there."""
        return present

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> IdentityModel:
        """Check that each output has an input to be."""
        if not config.inputs or len(config.inputs) != len(config.outputs):
            raise InvalidArgument(
                f"model '{config.name}' has {len(config.inputs)} inputs and {len(config.outputs)} outputs: "
                "the identity backend gives each input back, so declare as many outputs as inputs, at least one"
            )
        for given, taken in zip(config.inputs, config.outputs, strict=True):
            if given.dtype is not taken.dtype:
                raise InvalidArgument(
                    f"output '{taken.name}' of model '{config.name}' must have the data type of input '{given.name}', "
                    "which it gives back"
                )
        return IdentityModel(config)


class IdentityModel:
    """One version."""

    def __init__(self, config: ModelConfig) -> None:
        self._sources = {taken.name: given.name for given, taken in zip(config.inputs, config.outputs, strict=True)}
        self._batches = config.max_batch_size > 0
        self._first = int(_number(config, "first", 1 << 40))
        self._sleep_seconds = _number(config, "sleep_milliseconds", _LONGEST_MILLISECONDS) / 1000
        self._busy_seconds = _number(config, "busy_milliseconds", _LONGEST_MILLISECONDS) / 1000

    def open(self, placement: Placement) -> IdentityInstance:
        """Make an instance; it holds nothing."""
        return IdentityInstance(self._sources, self._batches, self._first, self._sleep_seconds, self._busy_seconds)

    def close(self) -> None:
        """Nothing is shared."""


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
        """One output and its input, when there is nothing else to do: what is measured then is everything else."""
        if len(sources) == 1 and not (first or sleep_seconds or busy_seconds):
            self._plain = next(iter(sources.items()))

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Give the inputs back, without a copy."""
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
        for name in wanted:
            if sources[name] not in inputs:
                raise InvalidArgument(
                    f"output '{name}' gives back input '{sources[name]}', which this request left out: "
                    "give it, or ask for other outputs"
                )
        given = {name: inputs[sources[name]] for name in wanted}
        if not self._first:
            return given
        return {name: self._cut(array) for name, array in given.items()}

    def close(self) -> None:
        """Nothing to free."""

    def _cut(self, array: Array) -> Array:
        # Spelt out, since -1 cannot be worked out beside an empty batch.
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
    # Not a number is not in the range either.
    if not 0 <= number <= highest:
        raise InvalidArgument(f"parameter {key} of model '{config.name}' is '{text[:32]}': use 0 to {highest}")
    return number
