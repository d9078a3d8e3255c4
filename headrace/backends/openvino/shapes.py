# SPDX-License-Identifier: Apache-2.0
"""Whether a model can compute inputs of these sizes, asked of OpenVINO's own shape inference before it computes.

Called by `backends.openvino.backend` for models with sizes that vary beyond the batch. The CPU plugin does not always look
itself: with f32 on ARM, 4000 columns for a matrix of 4 rows end the process (OpenVINO 2026.4). Each combination of sizes is
asked about once, which takes about as long as reading the model without its weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any

from headrace.backends.contract import Array
from headrace.backends.signature import Signature

REMEMBERED = 4096

Sizes = tuple[tuple[int, ...], ...]


def needs_asking(signature: Signature, *, batched: bool) -> bool:
    """Whether some size varies that is not the batch: the engine sees to it that all inputs have the same batch."""
    first = 1 if batched else 0
    return any(port.shape is None or -1 in port.shape[first:] for port in signature.inputs.values())


class ShapeCheck:
    """What is known of one model. Its instances share it. It keeps the model, and with it its weights as they were read."""

    def __init__(self, model: Any, signature: Signature, *, batched: bool) -> None:
        self._model = model
        self._names = list(signature.inputs)
        self._batched = batched
        self._known: OrderedDict[Sizes, bool] = OrderedDict()
        self._lock = Lock()

    def takes(self, inputs: Mapping[str, Array]) -> bool:
        """Whether the model can compute them."""
        # With a batch, any size of it is the same: a 2 stands for all, since 1 would be broadcast.
        sizes = tuple((2, *inputs[name].shape[1:]) if self._batched else inputs[name].shape for name in self._names)
        with self._lock:
            known = self._known.get(sizes)
            if known is None:
                known = self._known[sizes] = self._asked(sizes)
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            return known

    def _asked(self, sizes: Sizes) -> bool:
        model = self._model.clone()
        try:
            model.reshape({index: list(shape) for index, shape in enumerate(sizes)})
        except RuntimeError:
            return False
        return True
