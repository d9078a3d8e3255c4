# SPDX-License-Identifier: Apache-2.0
"""Control inputs: the tensors that tell a model where in which sequence a row is.

Made once per version; asked by `composing` for every request. Nothing here knows how requests are scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from headrace.backends.contract import Array
from headrace.core.dtypes import BYTES, DType
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Tensor
from headrace.engine.sequences.flags import SequenceId
from headrace.models.config.types import ControlInput


class Controls:
    """What one model wants to be told."""

    def __init__(self, controls: Sequence[ControlInput], model_name: str, *, batched: bool) -> None:
        self._model_name = model_name
        self._shape = (1, 1) if batched else (1,)
        self._corrid = next((control for control in controls if control.kind == "corrid"), None)
        told = [control for control in controls if control.kind != "corrid"]
        self._flags = {
            (start, end, ready): tuple(self._flag(control, start=start, end=end, ready=ready) for control in told)
            for start, end, ready in product((False, True), repeat=3)
        }
        self.filler: tuple[Tensor, ...] = self._flags[False, False, False]
        """For a slot without a request: not ready, and of no sequence."""
        if self._corrid is not None:
            nobody: bytes | int = b"" if self._corrid.dtype is BYTES else 0
            self.filler += (Tensor(self._corrid.name, self._corrid.dtype, self._array(self._corrid.dtype, nobody)),)

    def of(self, *, start: bool, end: bool) -> tuple[Tensor, ...]:
        """START, END and READY for a request, those of them the model has inputs for."""
        return self._flags[start, end, True]

    def corrid(self, id: SequenceId) -> Tensor | None:
        """The input with the correlation id, where the model has one; raises for an id that does not fit it."""
        control = self._corrid
        if control is None:
            return None
        if control.dtype is BYTES:
            return Tensor(control.name, BYTES, self._array(BYTES, str(id).encode(errors="replace")))
        if isinstance(id, str):
            raise InvalidArgument(
                f"sequence_id '{id}' is text, but model '{self._model_name}' takes its correlation ID as "
                f"{control.dtype.name} (input '{control.name}'): use a whole number"
            )
        bits = 8 * control.dtype.item_bytes
        if bits < 64 and id >= 1 << (bits - (control.dtype.numpy.kind == "i")):
            raise InvalidArgument(
                f"sequence_id {id} does not fit the {control.dtype.name} of input '{control.name}', by which model "
                f"'{self._model_name}' takes its correlation ID: use a smaller one"
            )
        if bits == 64 and control.dtype.numpy.kind == "i" and id >= 1 << 63:
            # As Triton: the same 64 bits. Still one number per sequence.
            return Tensor(control.name, control.dtype, self._array(control.dtype, id - (1 << 64)))
        return Tensor(control.name, control.dtype, self._array(control.dtype, id))

    def _flag(self, control: ControlInput, *, start: bool, end: bool, ready: bool) -> Tensor:
        on = {"start": start, "end": end, "ready": ready}[control.kind]
        value = control.true_value if on else control.false_value
        return Tensor(control.name, control.dtype, self._array(control.dtype, value))

    def _array(self, dtype: DType, value: float | bytes) -> Array:
        array = np.full(self._shape, value, dtype=dtype.numpy)
        # Shared by many requests.
        array.flags.writeable = False
        return array
