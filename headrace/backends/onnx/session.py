# SPDX-License-Identifier: Apache-2.0
"""Opens ONNX Runtime's sessions, and reads what a session takes and gives.

Called by `backends.onnx.backend`. Knows ONNX Runtime and no requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnxruntime as ort

from headrace.backends.onnx.graph_cache import first_line
from headrace.backends.onnx.reading import Outline
from headrace.backends.onnx.settings import CPU
from headrace.backends.signature import Port, Signature
from headrace.core.dtypes import (
    BF16,
    BOOL,
    BYTES,
    FP16,
    FP32,
    FP64,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
)
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

_FATAL = 4  # of ONNX Runtime's levels: nothing less is printed

_DTYPES = {
    "tensor(bool)": BOOL,
    "tensor(uint8)": UINT8,
    "tensor(uint16)": UINT16,
    "tensor(uint32)": UINT32,
    "tensor(uint64)": UINT64,
    "tensor(int8)": INT8,
    "tensor(int16)": INT16,
    "tensor(int32)": INT32,
    "tensor(int64)": INT64,
    "tensor(float16)": FP16,
    "tensor(float)": FP32,
    "tensor(double)": FP64,
    "tensor(bfloat16)": BF16,
    "tensor(string)": BYTES,
}


def open_session(
    config: ModelConfig,
    file: Path,
    options: Any,
    chosen: list[tuple[str, dict[str, str]]],
    content: bytes | None = None,
) -> Any:
    """A session that computes with the first of `chosen` that takes an operator.

    With `content`, that is the model, and `file` only what it is called.
    """
    try:
        return new_session(str(file) if content is None else content, options, chosen)
    except Exception as error:
        # Each of ONNX Runtime's exceptions is a class of its own under Exception.
        first = chosen[0][0]
        log.warning("model %s: %s could not be opened with %s: %s", config.name, file, first, first_line(error))
        log.debug("model %s: how that came about", config.name, exc_info=error)
        if first != CPU:
            raise FailedPrecondition(
                f"model '{config.name}': ONNX Runtime {ort.__version__} cannot open '{file.name}' with {first}. The "
                "device is out of memory or does not work, or the file is damaged; the server's log says which"
            ) from None
        if content is not None:
            raise InvalidArgument(
                f"model '{config.name}': ONNX Runtime {ort.__version__} cannot compute what '{file.name}' says: its "
                "operators, weights and inputs do not fit together. Compare the types and dims of the configuration with "
                "the model; the server's log says where it stopped"
            ) from None
        raise InvalidArgument(
            f"model '{config.name}': ONNX Runtime {ort.__version__} cannot read '{file.name}'. It is damaged, not an "
            "ONNX model, or needs a newer ONNX Runtime; the server's log says which. Export it again, or replace it"
        ) from None


def new_session(source: str | bytes, options: Any, chosen: list[tuple[str, dict[str, str]]]) -> Any:
    """A session of a file or of what would be in it; raises what ONNX Runtime does."""
    # Without the fallback: it would print, compute elsewhere from then on, and tell nobody.
    return ort.InferenceSession(
        source,
        options,
        providers=[name for name, _ in chosen],
        provider_options=[given for _, given in chosen],
        enable_fallback=False,
    )


def read_signature(config: ModelConfig, file: Path, outline: Outline | None) -> Signature:
    """What a model takes and gives, by a session that never computes: of its outline alone, where that is enough."""
    options = ort.SessionOptions()
    options.logid = config.name
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")
    # The session's own lines would tell of weights that are used nowhere, which the real one tells again.
    options.log_severity_level = _FATAL
    if outline is not None and outline.is_whole:
        try:
            told = signature_of(new_session(outline.model, options, [(CPU, {})]))
        except (
            Exception
        ) as error:  # operators that want their weights at hand, or a model that is wrong: the file tells
            log.debug("model %s: its outline does not open: %s", config.name, first_line(error))
        else:
            inputs = {name: port for name, port in told.inputs.items() if name not in outline.weights}
            given = {name: port for name, port in told.inputs.items() if name in outline.optional}
            return Signature(inputs, told.outputs, {**told.optional, **given})
    return signature_of(open_session(config, file, options, [(CPU, {})]))


def check_inputs(config: ModelConfig, signature: Signature) -> None:
    """Refuse a model that wants what no request can carry: complex numbers, those of 8 bits or fewer, and lists."""
    for port in signature.inputs.values():
        if port.dtype is None and port.kind.startswith("tensor("):
            raise InvalidArgument(
                f"input '{port.name}' of model '{config.name}' has elements of type {port.kind[7:-1]}, which requests "
                "cannot carry: export the model with a Cast from FP16, FP32 or INT8 in front of it"
            )


def signature_of(session: Any) -> Signature:
    """Read it from an `InferenceSession`."""
    return Signature(
        _ports(session.get_inputs()), _ports(session.get_outputs()), _ports(session.get_overridable_initializers())
    )


def _ports(arguments: Iterable[Any]) -> dict[str, Port]:
    ports = {}
    for argument in arguments:
        # A size is a number, the name of one that varies, or None.
        sizes = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in argument.shape or ())
        ports[argument.name] = Port(argument.name, argument.type, _DTYPES.get(argument.type), sizes or None)
    return ports
