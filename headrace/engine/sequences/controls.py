# SPDX-License-Identifier: Apache-2.0
"""Sequence flags of a request, and the control inputs that give them to the model.

The scheduler reads the flags of every request. Messages marked as Triton's are exactly Triton's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from headrace.backends.contract import Array
from headrace.core.dtypes import BYTES, DType
from headrace.core.errors import InvalidArgument
from headrace.core.requests import InferRequest
from headrace.core.tensors import Tensor
from headrace.models.config.types import ControlInput

SequenceId = int | str

_MAX_ID_CHARACTERS = 128
_MAX_ID = (1 << 64) - 1


class SequenceFlagsError(InvalidArgument):
    """The sequence parameters of a request are wrong."""


class SequenceFlags(NamedTuple):
    """The parameters `sequence_id`, `sequence_start` and `sequence_end`."""

    id: SequenceId
    start: bool
    end: bool


def read_flags(request: InferRequest, model_name: str) -> SequenceFlags:
    """Return the flags of a request; raise `SequenceFlagsError` if they are missing or invalid."""
    sequence_id = request.parameters.get("sequence_id", 0)
    if sequence_id in (0, "") and sequence_id is not False:
        raise SequenceFlagsError(  # Triton's
            f"inference request to model '{model_name}' must specify a non-zero or non-empty correlation ID"
        )
    if isinstance(sequence_id, str):
        if len(sequence_id) > _MAX_ID_CHARACTERS:
            raise SequenceFlagsError(
                f"sequence_id has {len(sequence_id)} characters; use {_MAX_ID_CHARACTERS} at most for model '{model_name}'"
            )
    # `bool` is a subclass of `int` in Python, but `True` as an id is a client's mistake.
    elif type(sequence_id) is not int or not 0 < sequence_id <= _MAX_ID:
        raise SequenceFlagsError(
            f"sequence_id {str(sequence_id)[:32]!a} for model '{model_name}' is not a correlation ID: use text, or a whole "
            f"number from 1 to {_MAX_ID}"
        )
    return SequenceFlags(sequence_id, _flag(request, "sequence_start"), _flag(request, "sequence_end"))


def _flag(request: InferRequest, name: str) -> bool:
    value = request.parameters.get(name, False)
    if not isinstance(value, bool):
        raise SequenceFlagsError(f"parameter '{name}' is {str(value)[:32]!a}: use true or false")
    return value


def start_flag_error(id: SequenceId, model_name: str) -> SequenceFlagsError:
    """Return the error for a request of an unknown sequence without START. Triton's message."""
    return SequenceFlagsError(
        f"inference request for sequence {id} to model '{model_name}' must specify the START flag on the first request "
        "of the sequence"
    )


def batch_size_error(model_name: str) -> SequenceFlagsError:
    """Return the error for a request with more than one row. Triton's message."""
    return SequenceFlagsError(
        f"inference request to model '{model_name}' must specify batch-size 1 due to requirements of sequence batcher"
    )


class ControlInputs:
    """The control inputs of one model."""

    def __init__(self, controls: Sequence[ControlInput], model_name: str, *, batched: bool) -> None:
        self._model_name = model_name
        self._shape = (1, 1) if batched else (1,)
        self._corrid = next((control for control in controls if control.kind == "corrid"), None)
        flags = [control for control in controls if control.kind != "corrid"]
        self._flags = {
            (start, end, ready): tuple(self._flag(control, start=start, end=end, ready=ready) for control in flags)
            for start, end, ready in product((False, True), repeat=3)
        }
        self.filler: tuple[Tensor, ...] = self._flags[False, False, False]
        """For a slot without a request: not ready, and without a correlation id."""
        if self._corrid is not None:
            no_id: bytes | int = b"" if self._corrid.dtype is BYTES else 0
            self.filler += (Tensor(self._corrid.name, self._corrid.dtype, self._array(self._corrid.dtype, no_id)),)

    def of(self, *, start: bool, end: bool) -> tuple[Tensor, ...]:
        """Return START, END and READY for a request, if the model has inputs for them."""
        return self._flags[start, end, True]

    def corrid(self, id: SequenceId) -> Tensor | None:
        """Return the input with the correlation id, if the model has one; raise if the id does not fit it."""
        control = self._corrid
        if control is None:
            return None
        if control.dtype is BYTES:
            return Tensor(control.name, BYTES, self._array(BYTES, str(id).encode(errors="replace")))
        if isinstance(id, str):
            raise SequenceFlagsError(
                f"sequence_id '{id}' is text, but model '{self._model_name}' takes its correlation ID as "
                f"{control.dtype.name} (input '{control.name}'): use a whole number"
            )
        bits = 8 * control.dtype.item_bytes
        if bits < 64 and id >= 1 << (bits - (control.dtype.numpy.kind == "i")):
            raise SequenceFlagsError(
                f"sequence_id {id} does not fit the {control.dtype.name} of input '{control.name}', by which model "
                f"'{self._model_name}' takes its correlation ID: use a smaller one"
            )
        if bits == 64 and control.dtype.numpy.kind == "i" and id >= 1 << 63:
            # As in Triton: the same 64 bits, still one number per sequence.
            return Tensor(control.name, control.dtype, self._array(control.dtype, id - (1 << 64)))
        return Tensor(control.name, control.dtype, self._array(control.dtype, id))

    def _flag(self, control: ControlInput, *, start: bool, end: bool, ready: bool) -> Tensor:
        on = {"start": start, "end": end, "ready": ready}[control.kind]
        value = control.true_value if on else control.false_value
        return Tensor(control.name, control.dtype, self._array(control.dtype, value))

    def _array(self, dtype: DType, value: float | bytes) -> Array:
        array = np.full(self._shape, value, dtype=dtype.numpy)
        # Read-only, because requests share it.
        array.flags.writeable = False
        return array
