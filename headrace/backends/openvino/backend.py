# SPDX-License-Identifier: Apache-2.0
"""The OpenVINO backend: OpenVINO IR (`model.xml`, `model.bin`) or ONNX (`default_model_filename: "model.onnx"`), on the CPU.

A version has one compiled model with one stream per instance; an instance has one inference request. `model` has the
compile properties and reads the files.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.backends.model_config import model_path
from headrace.backends.openvino.model import (
    ShapeCheck,
    import_openvino,
    is_yes,
    needs_shape_check,
    properties,
    read_model,
    signature_of,
)
from headrace.backends.signature import Port, Signature, check_signature, completion, decode_text, is_declared
from headrace.core.dtypes import BF16, BYTES
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument
from headrace.models.config.types import ModelConfig

FILENAMES = ("model.xml", "model.onnx")

ov = import_openvino()

log = logging.getLogger("headrace.backends")


class OpenVINOBackend:
    """`backend: "openvino"`."""

    def __init__(self) -> None:
        self._core = ov.Core()
        # Weights are read, not mapped: changing a mapped file would crash the process with a bus error.
        self._core.set_property({"ENABLE_MMAP": False})

    def usable_gpus(self, present: int) -> int:
        """Return 0: this backend runs on the CPU."""
        return 0

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return inputs, outputs and batch size from the model's graph."""
        if is_declared(config):
            return None
        return completion(config, signature_of(read_model(config, self._core, _model_file(config, files))))

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> OpenVINOModel:
        """Read the file, check the configuration against it, and compile it."""
        chosen = properties(config)
        file = _model_file(config, files)
        model = read_model(config, self._core, file)
        if is_yes(config, "RESHAPE_IO_LAYERS"):
            _reshape(config, model)
        signature = signature_of(model)
        check_signature(config, signature)
        try:
            compiled = self._core.compile_model(model, "CPU", chosen)
        except Exception:
            log.exception("model %s: %s could not be compiled", config.name, file)
            raise InvalidArgument(
                f"model '{config.name}': OpenVINO cannot compile '{file.name}' for the CPU. It has an operator or a type "
                "that the CPU has not, or a parameter has a value that OpenVINO does not know; the server's log says which"
            ) from None
        batched = config.max_batch_size > 0
        shape_check = (
            ShapeCheck(model, signature, batched=batched) if needs_shape_check(signature, batched=batched) else None
        )
        return OpenVINOModel(config, signature, compiled, shape_check)


class OpenVINOModel:
    """One version: a compiled model."""

    def __init__(
        self, config: ModelConfig, signature: Signature, compiled: Any, shape_check: ShapeCheck | None
    ) -> None:
        self._config = config
        self._signature = signature
        self._compiled = compiled
        self._shape_check = shape_check

    def open(self, placement: Placement) -> OpenVINOInstance:
        """Create an inference request of the compiled model."""
        if placement.kind == "gpu":
            raise FailedPrecondition(
                f"model '{self._config.name}' asks for a GPU, and OpenVINO serves on the CPU here: say KIND_CPU in "
                "instance_group"
            )
        return OpenVINOInstance(self._config, self._signature, self._compiled.create_infer_request(), self._shape_check)

    def close(self) -> None:
        """Release the compiled model; its memory is freed with its last request."""
        self._compiled = self._shape_check = None


class OpenVINOInstance:
    """One inference request."""

    def __init__(self, config: ModelConfig, signature: Signature, request: Any, shape_check: ShapeCheck | None) -> None:
        self._name = config.name
        self._shape_check = shape_check
        self._inputs = list(signature.inputs.values())
        self._outputs = {name: (index, port) for index, (name, port) in enumerate(signature.outputs.items())}
        self._request = request

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch. OpenVINO computes all outputs; only the requested ones are copied."""
        request = self._request
        if not self._fit(inputs) or (self._shape_check is not None and not self._shape_check.takes(inputs)):
            raise self._shape_error(inputs)
        try:
            # The request keeps the last batch's tensors and arrays until the next batch.
            for index, port in enumerate(self._inputs):
                request.set_input_tensor(index, _tensor(port, inputs[port.name]))
            # Not `infer`: with one thread it swallows an error (OpenVINO 2026.4), and the outputs would then be those of the
            # previous batch, of another client.
            request.start_async()
            request.wait()
            return {
                name: _array(request.get_output_tensor(self._outputs[name][0]), *self._outputs[name])
                for name in requested
            }
        except HeadraceError:
            raise
        except Exception:
            log.exception("model %s could not compute a batch", self._name)
            raise Internal(
                f"model '{self._name}' failed to compute this request; the server's log has the details"
            ) from None

    def close(self) -> None:
        """Release the request and its memory."""
        self._request = self._shape_check = None

    def _fit(self, inputs: Mapping[str, Array]) -> bool:
        return all(port.name in inputs and port.takes(inputs[port.name].shape) for port in self._inputs)

    def _shape_error(self, inputs: Mapping[str, Array]) -> InvalidArgument:
        shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in inputs.items())
        return InvalidArgument(
            f"model '{self._name}' does not accept inputs of these shapes: {shapes}. Compare them with the model's "
            "metadata; sizes that may vary there may still have to fit each other"
        )


def _model_file(config: ModelConfig, files: ModelFiles) -> Path:
    return model_path(config, files, *FILENAMES)


def _reshape(config: ModelConfig, model: Any) -> None:
    front = [-1] if config.max_batch_size > 0 else []
    try:
        model.reshape({spec.name: [*front, *(spec.dims or ())] for spec in config.inputs})
    except Exception:
        log.exception("model %s could not be reshaped", config.name)
        raise InvalidArgument(
            f"model '{config.name}' cannot have the inputs that its configuration declares: correct their dims, or leave "
            "RESHAPE_IO_LAYERS out; the server's log says where it stopped"
        ) from None


def _tensor(port: Port, array: Array) -> Any:
    if port.dtype is BYTES:
        return ov.Tensor(np.array(decode_text(port.name, array), np.str_).reshape(array.shape))
    contiguous = array if array.flags.c_contiguous else array.copy()
    if port.dtype is BF16:
        return ov.Tensor(contiguous, list(contiguous.shape), ov.Type.bf16)
    # A tensor on the array's own memory. OpenVINO demands that it be writable, though it does not write.
    return ov.Tensor(contiguous, shared_memory=contiguous.flags.writeable)


def _array(tensor: Any, _index: int, port: Port) -> Array:
    """Copy the tensor: the request reuses its memory for the next batch."""
    if port.dtype is BYTES:
        text = tensor.str_data
        return np.array([item.encode() for item in text.ravel()], object).reshape(text.shape)
    data = np.array(tensor.data)
    return data.view(np.uint16) if port.dtype is BF16 and data.dtype != np.uint16 else data
