# SPDX-License-Identifier: Apache-2.0
"""Implicit state: outputs of one request of a sequence that become inputs of its next request.

`ImplicitState` has the initial state of a sequence. `StatefulConcatenator` stores the new state from a result; runners call
it in the thread that computes. A failed request does not change the state: it is stored only after the whole result has been
checked.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.backends.contract import Array
from headrace.core.dtypes import BYTES, DType
from headrace.core.errors import FailedPrecondition, Internal, InvalidArgument, Unimplemented
from headrace.core.tensors import Tensor, element_count, tensor_from_buffer
from headrace.engine.execution.concatenation import BatchConcatenator, BatchOutputs
from headrace.engine.scheduling.pending_request import PendingRequest
from headrace.engine.sequences.sequence import ActiveSequence, SequenceRequest
from headrace.models.config.types import InitialState, ModelConfig, OutputSpec, SequenceBatching, StateSpec


class ImplicitState:
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

    def initial(self) -> dict[str, Array]:
        """Return the initial state of a sequence. The arrays are shared and must not be modified."""
        return dict(self._initial)

    def tensors(self, state: Mapping[str, Array]) -> list[Tensor]:
        """Return a sequence's state as input tensors."""
        return [Tensor(name, self._dtypes[name], array) for name, array in state.items()]

    def key(self, key: Hashable, state: Mapping[str, Array]) -> Hashable:
        """Return the batch key of a request, extended by the shapes of its state if they can differ."""
        return (key, *(array.shape for array in state.values())) if self._by_shape else key


class StatefulConcatenator(BatchConcatenator):
    """For models with implicit state. The requests already have the state inputs."""

    def __init__(self, config: ModelConfig, sequences: SequenceBatching) -> None:
        super().__init__(config)
        if any(spec.allow_ragged_batch or spec.pad_value is not None for spec in config.inputs):
            raise Unimplemented(
                f"model '{config.name}' has both implicit state and ragged or padded inputs, which is not offered: "
                "remove allow_ragged_batch and pad_value from its inputs, or sequence_batching.state"
            )
        self._states = sequences.states
        self.all_outputs = tuple(dict.fromkeys((*self._all, *(spec.output_name for spec in sequences.states))))
        self._optional = config.decoupled
        """Responses of decoupled models only need a state if they change it."""

    def requested_outputs(self, batch: Sequence[PendingRequest]) -> Sequence[str]:
        """Return the requested outputs and the state outputs."""
        names = dict.fromkeys(super().requested_outputs(batch))
        names.update(dict.fromkeys(spec.output_name for spec in self._states))
        return tuple(names)

    def split_single(self, pending: PendingRequest, result: Mapping[str, Array]) -> Sequence[Tensor]:
        """Return the outputs of a request that was computed alone, and store its new state."""
        return self.split((pending,), result)[0]

    def split(self, batch: Sequence[PendingRequest], result: Mapping[str, Array]) -> BatchOutputs:
        """Return the outputs of each request, and store the new states."""
        rows = sum(pending.rows for pending in batch)
        states: list[tuple[str, Array]] = []
        for spec in self._states:
            array = result.get(spec.output_name)
            if array is not None:
                described = OutputSpec(spec.output_name, spec.dtype, spec.dims)
                states.append((spec.input_name, self.checked_array(described, spec.dtype, array, rows)))
            elif not self._optional:
                raise Internal(f"model '{self._name}' did not return its state '{spec.output_name}'")
        # By the callers' requests: those for the model also request the state outputs.
        outputs = super().split([_caller_request(pending) for pending in batch], result)
        start = 0
        for pending in batch:
            stop = start + pending.rows
            if isinstance(pending.sequence, ActiveSequence):
                for name, array in states:
                    # A view would keep the whole batch in memory until the last of its sequences finishes.
                    pending.sequence.state[name] = array if len(batch) == 1 else array[start:stop].copy()
            start = stop
        return outputs


def _caller_request(pending: PendingRequest) -> PendingRequest:
    if isinstance(pending, SequenceRequest) and pending.caller_request is not None:
        return pending.caller_request
    return pending


def zeros(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Return an array of zeros, or of empty strings."""
    array: Array = np.full(shape, b"", dtype=object) if dtype is BYTES else np.zeros(shape, dtype.numpy)
    return array


def read_initial_states(sequences: SequenceBatching, model_folder: Path) -> dict[str, Array]:
    """Return the configured initial states by state input. Reads files."""
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
        # As in Triton: additional bytes are ignored.
        data = data[:needed]
    return tensor_from_buffer(initial.name, initial.dtype, initial.dims, data).array
