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
from headrace.modelconfig.types import ModelConfig

log = logging.getLogger("headrace.backends")

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


def open_session(config: ModelConfig, file: Path, options: Any, chosen: list[tuple[str, dict[str, str]]]) -> Any:
    """A session that computes with the first of `chosen` that takes an operator."""
    names = [name for name, _ in chosen]
    settings = [given for _, given in chosen]
    try:
        # Without the fallback: it would print, compute elsewhere from then on, and tell nobody.
        return ort.InferenceSession(
            str(file), options, providers=names, provider_options=settings, enable_fallback=False
        )
    except Exception:
        # Each of ONNX Runtime's exceptions is a class of its own under Exception.
        log.exception("model %s: %s could not be opened with %s", config.name, file, names[0])
        if names[0] != CPU:
            raise FailedPrecondition(
                f"model '{config.name}': ONNX Runtime {ort.__version__} cannot open '{file.name}' with {names[0]}. The "
                "device is out of memory or does not work, or the file is damaged; the server's log says which"
            ) from None
        raise InvalidArgument(
            f"model '{config.name}': ONNX Runtime {ort.__version__} cannot read '{file.name}'. It is damaged, not an "
            "ONNX model, has lost its external data, or needs a newer ONNX Runtime; the server's log says which"
        ) from None


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
