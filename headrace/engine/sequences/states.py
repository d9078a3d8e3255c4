# SPDX-License-Identifier: Apache-2.0
"""Implicit state: outputs of one request of a sequence that are inputs of its next.

`States` knows what a sequence begins with. `StatefulJoiner` takes the new state off a result and keeps it; the runners
use it, in the thread that computes. A request that fails leaves the state as it was: nothing is kept before all of a
result is found right.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.backends.contract import Array
from headrace.core.dtypes import BYTES, DType
from headrace.core.errors import FailedPrecondition, Internal, InvalidArgument, Unimplemented
from headrace.core.tensors import Tensor, element_count, tensor_from_buffer
from headrace.engine.execution.joining import Answers, Joiner
from headrace.engine.scheduling.pending import Pending
from headrace.engine.sequences.live import LiveSequence, Step
from headrace.models.config.types import InitialState, ModelConfig, OutputSpec, SequenceBatching, StateSpec


class States:
    """The implicit state of one model's sequences."""

    def __init__(self, specs: Sequence[StateSpec], initial: Mapping[str, Array], *, batched: bool) -> None:
        self._dtypes = {spec.input_name: spec.dtype for spec in specs}
        self.output_names = tuple(spec.output_name for spec in specs)
        self._initial: dict[str, Array] = {}
        for spec in specs:
            array = initial.get(spec.input_name)
            if array is None:
                array = zeros(spec.dtype, tuple(1 if size == -1 else size for size in spec.dims))
            self._initial[spec.input_name] = array[np.newaxis] if batched else array
        self._by_shape = any(-1 in spec.dims for spec in specs)

    def fresh(self) -> dict[str, Array]:
        """What a sequence begins with. The arrays are shared: nobody writes to them."""
        return dict(self._initial)

    def tensors(self, state: Mapping[str, Array]) -> list[Tensor]:
        """A sequence's state as inputs."""
        return [Tensor(name, self._dtypes[name], array) for name, array in state.items()]

    def key(self, key: Hashable, state: Mapping[str, Array]) -> Hashable:
        """A request's key, told apart by the shapes of its sequence's state where they can differ."""
        return (key, *(array.shape for array in state.values())) if self._by_shape else key


class StatefulJoiner(Joiner):
    """For models with implicit state. The state inputs are in the requests it is given."""

    def __init__(self, config: ModelConfig, sequences: SequenceBatching) -> None:
        super().__init__(config)
        if any(spec.allow_ragged_batch or spec.pad_value is not None for spec in config.inputs):
            raise Unimplemented(
                f"model '{config.name}' has both implicit state and ragged or padded inputs, which is not offered: "
                "remove allow_ragged_batch and pad_value from its inputs, or sequence_batching.state"
            )
        self._states = sequences.states
        self.all_names = tuple(dict.fromkeys((*self._all, *(spec.output_name for spec in sequences.states))))
        self._optional = config.decoupled
        """Only the responses that change the state need to carry it."""

    def wanted(self, batch: Sequence[Pending]) -> Sequence[str]:
        """See `Joiner.wanted`; and the new state."""
        names = dict.fromkeys(super().wanted(batch))
        names.update(dict.fromkeys(spec.output_name for spec in self._states))
        return tuple(names)

    def split_alone(self, pending: Pending, result: Mapping[str, Array]) -> Sequence[Tensor]:
        """See `Joiner.split_alone`; and keep the new states."""
        return self.split((pending,), result)[0]

    def split(self, batch: Sequence[Pending], result: Mapping[str, Array]) -> Answers:
        """See `Joiner.split`; and keep the new states."""
        rows = sum(pending.rows for pending in batch)
        states: list[tuple[str, Array]] = []
        for spec in self._states:
            array = result.get(spec.output_name)
            if array is not None:
                described = OutputSpec(spec.output_name, spec.dtype, spec.dims)
                states.append((spec.input_name, self.checked_array(described, spec.dtype, array, rows)))
            elif not self._optional:
                raise Internal(f"model '{self._name}' did not return its state '{spec.output_name}'")
        # By what the callers asked for: the model was asked for its state too.
        answers = super().split([_caller(pending) for pending in batch], result)
        start = 0
        for pending in batch:
            stop = start + pending.rows
            if isinstance(pending.sequence, LiveSequence):
                for name, array in states:
                    # A view would hold the whole batch in memory for as long as the slowest sequence lives.
                    pending.sequence.state[name] = array if len(batch) == 1 else array[start:stop].copy()
            start = stop
        return answers


def _caller(pending: Pending) -> Pending:
    return pending.asked if isinstance(pending, Step) and pending.asked is not None else pending


def zeros(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Zeros, or empty strings."""
    array: Array = np.full(shape, b"", dtype=object) if dtype is BYTES else np.zeros(shape, dtype.numpy)
    return array


def read_initial_states(sequences: SequenceBatching, model_folder: Path) -> dict[str, Array]:
    """What the sequences of a model begin with, by state input, where the configuration says so. Reads files."""
    return {spec.input_name: _initial(spec, model_folder) for spec in sequences.states if spec.initial}


def _initial(spec: StateSpec, model_folder: Path) -> Array:
    if len(spec.initial) > 1:
        raise InvalidArgument(f"state '{spec.input_name}' has {len(spec.initial)} initial states: give it one")
    initial = spec.initial[0]
    if initial.dtype is not spec.dtype:
        raise InvalidArgument(
            f"the initial state of '{spec.input_name}' is {initial.dtype.name}, the state {spec.dtype.name}: make them equal"
        )
    if -1 in initial.dims:
        raise InvalidArgument(f"the initial state of '{spec.input_name}' needs fixed dims, not {list(initial.dims)}")
    if len(initial.dims) != len(spec.dims) or any(
        want not in (-1, size) for size, want in zip(initial.dims, spec.dims, strict=True)
    ):
        raise InvalidArgument(
            f"the initial state of '{spec.input_name}' has dims {list(initial.dims)}, which do not fit the state's "
            f"{list(spec.dims)}"
        )
    return zeros(initial.dtype, initial.dims) if initial.zero else _from_file(initial, model_folder)


def _from_file(initial: InitialState, model_folder: Path) -> Array:
    path = model_folder / "initial_state" / initial.data_file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FailedPrecondition(f"{path}: the initial state cannot be read ({error.strerror})") from None
    if initial.dtype is not BYTES:
        needed = element_count(initial.name, initial.dims) * initial.dtype.item_bytes
        if len(data) < needed:
            raise InvalidArgument(
                f"{path}: the initial state has {len(data)} bytes; dims {list(initial.dims)} of {initial.dtype.name} "
                f"need {needed}"
            )
        # As Triton: what is left over is not looked at.
        data = data[:needed]
    return tensor_from_buffer(initial.name, initial.dtype, initial.dims, data).array
