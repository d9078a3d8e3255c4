# SPDX-License-Identifier: Apache-2.0
"""OpenVINO models: the import of OpenVINO, compile properties from the configuration, inputs and outputs, shape checks."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from headrace.backends.contract import Array
from headrace.backends.signature import Port, Signature
from headrace.core.dtypes import BF16, BOOL, BYTES, DTYPES
from headrace.core.errors import InvalidArgument, Unimplemented
from headrace.models.config.types import ModelConfig

_TELEMETRY = "openvino_telemetry"
_PASSED_THROUGH = (
    "PERFORMANCE_HINT",
    "INFERENCE_PRECISION_HINT",
    "INFERENCE_NUM_THREADS",
    "NUM_STREAMS",
    "COMPILATION_NUM_THREADS",
    "EXECUTION_MODE_HINT",
    "PERFORMANCE_HINT_NUM_REQUESTS",
    "ENABLE_CPU_PINNING",
    "ENABLE_HYPER_THREADING",
    "SCHEDULING_CORE_TYPE",
    "MODEL_DISTRIBUTION_POLICY",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE",
    "KV_CACHE_PRECISION",
    "CPU_DENORMALS_OPTIMIZATION",
    "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE",
)


def import_openvino() -> Any:
    """Import OpenVINO without its telemetry. Raise ImportError if it is not installed.

    `import openvino` starts a process that reports to a Google server, unless the user has opted out. If the package
    openvino-telemetry is not installed, OpenVINO uses a stub that does nothing; so that package is hidden during the
    import.
    """
    known = sys.modules.get(_TELEMETRY)
    # None in sys.modules makes an import fail.
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        return import_module("openvino")
    finally:
        if known is None:
            del sys.modules[_TELEMETRY]
        else:
            sys.modules[_TELEMETRY] = known


def properties(config: ModelConfig) -> dict[str, str]:
    """Return the properties to compile a model with."""
    parameters = config.parameters
    _check_parameters(config)
    instances = sum(group.count for group in config.instance_groups if not group.passive) or 1
    # One compiled model for all instances, with one stream each. Two instances had 1.3 times the throughput of one with
    # a compiled model each, and 1.7 times with two streams of one model, for half the memory (2 cores, 64 MB of weights).
    chosen = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": str(instances),
        "INFERENCE_NUM_THREADS": str(instances),
        "INFERENCE_PRECISION_HINT": "f32",
        # Pinned threads of several models and of the server would all run on the first cores.
        "ENABLE_CPU_PINNING": "NO",
    }
    if is_yes(config, "HINT_BF16"):
        chosen["INFERENCE_PRECISION_HINT"] = "bf16"
    chosen.update({key: parameters[key] for key in _PASSED_THROUGH if key in parameters})
    return chosen


def is_yes(config: ModelConfig, key: str) -> bool:
    """Return whether a YES/NO parameter is YES."""
    text = config.parameters.get(key, "NO").upper()
    if text not in ("YES", "NO"):
        raise InvalidArgument(f"parameter {key} is '{text[:32]}': use YES or NO")
    return text == "YES"


def _check_parameters(config: ModelConfig) -> None:
    if "CPU_EXTENSION_PATH" in config.parameters:
        raise Unimplemented(
            f"model '{config.name}' has parameter CPU_EXTENSION_PATH, which would load a library into the server: export "
            "the model with OpenVINO's own operators"
        )
    if is_yes(config, "ENABLE_BATCH_PADDING"):
        raise Unimplemented(
            f"model '{config.name}' has parameter ENABLE_BATCH_PADDING: export the model with a first dimension of any "
            "size, and leave the parameter out"
        )
    device = config.parameters.get("TARGET_DEVICE", "CPU")
    if device != "CPU":
        raise Unimplemented(
            f"model '{config.name}' has parameter TARGET_DEVICE '{device[:32]}': only CPU is served, leave it out"
        )


MAX_CACHED_SHAPES = 4096

Sizes = tuple[tuple[int, ...], ...]


def needs_shape_check(signature: Signature, *, batched: bool) -> bool:
    """Return whether a size other than the batch varies: the engine ensures that all inputs have the same batch size."""
    first = 1 if batched else 0
    return any(port.shape is None or -1 in port.shape[first:] for port in signature.inputs.values())


class ShapeCheck:
    """Checks input shapes for the instances of one model. It keeps the model, with its weights as they were read."""

    def __init__(self, model: Any, signature: Signature, *, batched: bool) -> None:
        self._model = model
        self._names = list(signature.inputs)
        self._batched = batched
        self._known: OrderedDict[Sizes, bool] = OrderedDict()
        self._lock = Lock()

    def takes(self, inputs: Mapping[str, Array]) -> bool:
        """Return whether the model accepts inputs of these shapes."""
        # All batch sizes are alike: 2 represents them, since 1 would broadcast.
        sizes = tuple((2, *inputs[name].shape[1:]) if self._batched else inputs[name].shape for name in self._names)
        with self._lock:
            known = self._known.get(sizes)
            if known is None:
                known = self._known[sizes] = self._infer_shapes(sizes)
                if len(self._known) > MAX_CACHED_SHAPES:
                    self._known.popitem(last=False)
            return known

    def _infer_shapes(self, sizes: Sizes) -> bool:
        model = self._model.clone()
        try:
            model.reshape({index: list(shape) for index, shape in enumerate(sizes)})
        except RuntimeError:
            return False
        return True


_DTYPES = {
    **{f"{dtype.numpy.kind}{8 * dtype.item_bytes}": dtype for dtype in DTYPES.values() if dtype.struct_code},
    "boolean": BOOL,
    "bf16": BF16,
    "string": BYTES,
}
"""Data types by the names of OpenVINO: u8, i64, f32, ..."""

log = logging.getLogger("headrace.backends")


def read_model(config: ModelConfig, core: Any, file: Path) -> Any:
    """Read an `openvino.Model`."""
    if file.suffix not in (".xml", ".onnx"):
        raise InvalidArgument(
            f"model '{config.name}': '{file.name}' is neither OpenVINO's .xml nor .onnx: convert it with "
            "openvino.convert_model and save it with openvino.save_model"
        )
    try:
        return core.read_model(str(file))
    except Exception:
        # OpenVINO raises RuntimeError for everything; a name that is not UTF-8 is a UnicodeDecodeError.
        log.exception("model %s: %s could not be read", config.name, file)
        weights_hint = f", or '{file.stem}.bin' beside it is damaged or missing" if file.suffix == ".xml" else ""
        raise InvalidArgument(
            f"model '{config.name}': OpenVINO cannot read '{file.name}'. It is damaged, or of a newer OpenVINO"
            f"{weights_hint}; the server's log says which. Copy it again, or save it again with openvino.save_model"
        ) from None


def signature_of(model: Any) -> Signature:
    """Return the signature of an `openvino.Model` or a compiled one."""
    return Signature(_ports(model.inputs), _ports(model.outputs), {})


def name_of(port: Any) -> str:
    """Return the name of an input or output, or of its node if the exporter gave none."""
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
