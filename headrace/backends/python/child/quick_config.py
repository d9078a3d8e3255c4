# SPDX-License-Identifier: Apache-2.0
"""What a `predict` function's hints tell of its configuration, and whether the two go together. Called by `quick`."""

from __future__ import annotations

from typing import Any

from headrace.backends.python.child.configs import ModelConfig
from headrace.backends.python.child.errors import TritonModelException
from headrace.backends.python.child.hints import Hint, Signature
from headrace.backends.python.child.measures import Logger
from headrace.core.dtypes import DTYPES, FP32, DType

_ASSUMED_DIMS = [-1]


def complete(signature: Signature, batch: int, config: ModelConfig) -> ModelConfig:
    """Add what the hints tell to what the configuration says; where a hint leaves type or shape open, say so."""
    given = config.as_dict()
    batches = bool(given.get("max_batch_size", 0) or batch)
    check_batching(signature, batches)
    check_inputs(signature, given)
    for name, hint in signature.inputs.items():
        more = {"optional": True} if hint.optional else {}
        config.add_input({**_described("input", name, hint, given), **more})
    for name, hint in output_hints(signature, given).items():
        config.add_output(_described("output", name, hint, given))
    if batch and not given.get("max_batch_size", 0):
        config.set_max_batch_size(batch)
    if batches and "sequence_batching" not in given:
        config.set_dynamic_batching()
    if signature.streams:
        config.set_model_transaction_policy({"decoupled": True})
    return config


def check_batching(signature: Signature, batches: bool) -> None:
    """Refuse what cannot have rows."""
    if not batches:
        return
    if signature.streams:
        raise TritonModelException("predict answers several times, so it cannot batch: take BATCH out")
    hints = {**signature.inputs, **signature.outputs}
    wrong = [name for name, hint in hints.items() if hint.form != "array"]
    if wrong:
        raise TritonModelException(
            f"predict batches, and {', '.join(wrong)} cannot have rows: make each an array, such as "
            "npt.NDArray[np.float32], whose first dimension is the batch; or take BATCH out"
        )


def check_inputs(signature: Signature, config: dict[str, Any]) -> None:
    """Refuse a configuration of another function."""
    for tensor in config.get("input", ()):
        if tensor["name"] not in signature.inputs:
            raise TritonModelException(
                f"the configuration has an input '{tensor['name']}', and predict takes "
                f"{', '.join(signature.inputs)}: rename one of them"
            )


def output_hints(signature: Signature, config: dict[str, Any]) -> dict[str, Hint]:
    """The hints under the names that the configuration has for the outputs, if it has any."""
    hints = dict(signature.outputs)
    declared = [tensor["name"] for tensor in config.get("output", ())]
    if not declared:
        if not hints:
            raise TritonModelException(
                "predict returns a dict or tuple, and the type hint does not tell what is in it: write a TypedDict or "
                "tuple[X, Y], or declare the outputs in config.pbtxt"
            )
        return hints
    if not hints or set(declared) <= hints.keys():
        return {name: hints.get(name, Hint()) for name in declared}
    # `output` and `output_0` are no names that somebody has chosen.
    if all(name.startswith("output") for name in hints) and len(declared) == len(hints):
        return dict(zip(declared, hints.values(), strict=True))
    raise TritonModelException(
        f"the configuration has the outputs {', '.join(declared)}, and predict returns {', '.join(hints)}: use the same "
        "names"
    )


def dtype_of_field(data_type: str) -> DType | None:
    """The data type that a configuration writes as TYPE_FP32; None for none."""
    return DTYPES.get(data_type.removeprefix("TYPE_").replace("STRING", "BYTES"))


def _described(side: str, name: str, hint: Hint, config: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = next((tensor for tensor in config.get(side, ()) if tensor["name"] == name), {})
    dtype = hint.dtype or dtype_of_field(given.get("data_type", ""))
    dims = list(hint.dims or given.get("dims", ()))
    if dtype is None or not dims:
        Logger.log_info(
            f"{side} '{name}' of predict is taken to be {(dtype or FP32).name} of shape {dims or _ASSUMED_DIMS}, as its "
            "type hint does not say; to change that, write for example Annotated[npt.NDArray[np.float32], (-1, 16)]"
        )
    kind = (dtype or FP32).name.replace("BYTES", "STRING")
    return {"name": name, "data_type": f"TYPE_{kind}", "dims": dims or list(_ASSUMED_DIMS)}
