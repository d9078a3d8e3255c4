# SPDX-License-Identifier: Apache-2.0
"""The one door to the models: every protocol brings an `InferRequest` here and gets an `InferResponse` back.

Called by the sub-rooms of `api`. Checks what only a model can know (its name, its input, its shape); knows no protocol.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.errors import InvalidArgument, NotFound
from headrace.core.messages import InferRequest
from headrace.core.names import check_name
from headrace.core.tensors import Tensor
from headrace.engine.batching import OUTPUT_NAME, VERSION, Batcher, Done
from headrace.engine.builtin import BUILTIN_MODELS, BuiltinModel

INPUT_NAME = "INPUT0"


class DataPlane:
    """Built-in models, each behind a batcher."""

    def __init__(self, models: Sequence[BuiltinModel] = BUILTIN_MODELS) -> None:
        self._models = {model.name: (model, Batcher(model.name, model.compute, model.max_rows)) for model in models}
        self.ready = True

    def has_model(self, name: str, version: str = "") -> bool:
        """Whether a request for this model and version would be served."""
        return name in self._models and version in ("", VERSION)

    def model_names(self) -> list[str]:
        """Every model, for people."""
        return sorted(self._models)

    def submit(self, request: InferRequest, done: Done) -> None:
        """Compute a request. Raises at once for a wrong one; otherwise `done` is called later, in the loop's thread."""
        entry = self._models.get(request.model_name)
        if entry is None:
            check_name(request.model_name)
            raise NotFound(f"Request for unknown model: '{request.model_name[:256]}' is not found")
        model, batcher = entry
        if request.model_version and request.model_version != VERSION:
            raise NotFound(
                f"Request for unknown model: '{model.name}' version {request.model_version[:32]} is not found"
            )
        batcher.submit(_checked_input(model, request), request.id, done)


def _checked_input(model: BuiltinModel, request: InferRequest) -> Tensor:
    inputs = request.inputs
    if len(inputs) != 1:
        raise _wrong_inputs(model, [tensor.name for tensor in inputs])
    tensor = inputs[0]
    if tensor.name != INPUT_NAME:
        raise InvalidArgument(
            f"unexpected inference input '{tensor.name[:256]}' for model '{model.name}': its input is '{INPUT_NAME}'"
        )
    for output in request.outputs:
        if output.name != OUTPUT_NAME:
            raise InvalidArgument(
                f"unexpected inference output '{output.name[:256]}' for model '{model.name}': it has '{OUTPUT_NAME}'"
            )
    shape = tensor.array.shape
    if not shape or shape[0] == 0:
        raise InvalidArgument(f"input '{INPUT_NAME}' of model '{model.name}' needs a batch dimension of at least 1")
    if shape[0] > model.max_rows:
        raise InvalidArgument(f"inference request batch-size must be <= {model.max_rows} for '{model.name}'")
    if model.dims is not None and shape[1:] != model.dims:
        raise InvalidArgument(
            f"unexpected shape for input '{INPUT_NAME}' for model '{model.name}'. "
            f"Expected {_listed((-1, *model.dims))}, got {_listed(shape)}."
        )
    if model.dtype is not None and tensor.dtype is not model.dtype:
        raise InvalidArgument(
            f"inference input '{INPUT_NAME}' data-type is '{tensor.dtype.name}', "
            f"but model '{model.name}' expects '{model.dtype.name}'"
        )
    return tensor


# The texts of these two are Triton's, to the letter: clients in the field look for them.


def _wrong_inputs(model: BuiltinModel, given: Sequence[str]) -> InvalidArgument:
    missing = [] if INPUT_NAME in given else [INPUT_NAME]
    shown = [name[:64] for name in given[:16]]
    return InvalidArgument(
        f"expected 1 inputs but got {len(given)} inputs for model '{model.name}'. Got input(s) {_listed(shown)}, "
        f"but missing required input(s) {_listed(missing)}. Please provide all required input(s)."
    )


def _listed(items: Sequence[int | str]) -> str:
    """As Triton writes lists: without spaces."""
    return f"[{','.join(map(repr, items))}]"
