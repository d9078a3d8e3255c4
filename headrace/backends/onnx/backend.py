# SPDX-License-Identifier: Apache-2.0
"""The ONNX backend: models in ONNX format, run by ONNX Runtime on the CPU or a GPU.

Each instance has a session of its own, so that instances run in parallel. `session` has the options and opens sessions.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument as OrtInvalidArgument

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.backends.model_config import model_path, named_path
from headrace.backends.onnx.graph_cache import GraphCache, first_line
from headrace.backends.onnx.model_file import check_external, read_outline
from headrace.backends.onnx.session import (
    Providers,
    caches_graph,
    can_use_gpus,
    check_inputs,
    graph_settings,
    new_session,
    open_session,
    providers,
    read_signature,
    run_options,
    session_options,
    signature_of,
)
from headrace.backends.signature import Signature, check_signature, completion, decode_text, is_declared
from headrace.core.dtypes import BF16, BYTES
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument, Unimplemented
from headrace.models.config.types import ModelConfig

DEFAULT_FILENAME = "model.onnx"

_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16; serving does not need the onnx package

log = logging.getLogger("headrace.backends")


class OnnxBackend:
    """`backend: "onnxruntime"`."""

    def usable_gpus(self, present: int) -> int:
        """Return all GPUs if this build of ONNX Runtime supports GPUs, else 0."""
        return present if can_use_gpus() else 0

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return inputs, outputs and batch size from the model's graph."""
        file = _model_file(config, files)
        outline = read_outline(file)
        if outline is not None:
            check_external(config, file, outline)
        if is_declared(config):
            return None
        signature = read_signature(config, file, outline)
        check_inputs(config, signature)
        return completion(config, signature)

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> OnnxModel:
        """Find the files and check the settings. Each instance reads the weights into its own session."""
        session_options(config)
        caches_graph(config)
        file = _model_file(config, files)
        outline = read_outline(file)
        return OnnxModel(config, file, [] if outline is None else check_external(config, file, outline))


class OnnxModel:
    """One version: its file, the files with external weights, and the session options."""

    def __init__(
        self, config: ModelConfig, file: Path, weights: Sequence[Path] = (), content: bytes | None = None
    ) -> None:
        """`content`, if given, is the model in ONNX format, converted from the file of another format."""
        self._config = config
        self._file = file
        self._weights = weights
        self._content = content

    def open(self, placement: Placement) -> OnnxInstance:
        """Read the file into a session. Reject a configuration that does not fit the file."""
        # The configuration is checked here and not in `load`, because only a session knows the signature, and a second
        # session would read the weights twice.
        chosen = providers(self._config, placement)
        session = self._cached_session(chosen) if self._content is None and caches_graph(self._config) else None
        if session is None:
            session = open_session(self._config, self._file, session_options(self._config), chosen, self._content)
        if chosen[0][0] not in session.get_providers():
            # ONNX Runtime silently falls back to the CPU; a configuration that asks for a GPU must fail instead.
            raise FailedPrecondition(
                f"model '{self._config.name}' asks for {chosen[0][0]} on device {placement.device}, which did not "
                "start: check the driver, the device number and the log, or say KIND_CPU in instance_group"
            )
        signature = signature_of(session)
        check_inputs(self._config, signature)
        check_signature(self._config, signature)
        if placement.kind == "gpu":
            return OnnxCudaInstance(self._config, session, signature, placement.device)
        return OnnxInstance(self._config, session, signature)

    def _cached_session(self, chosen: Providers) -> Any | None:
        """Open a session from the cached graph, or one that writes its graph to the cache; None if neither works."""
        try:
            cache = GraphCache(self._config, self._file, self._weights, graph_settings(self._config, chosen))
        except OSError:
            return None  # The model file itself cannot be read; opening it reports the error.
        cached = cache.find()
        if cached is not None:
            options = session_options(self._config)
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            try:
                return new_session(str(cached), options, chosen)
            except Exception as error:
                cache.discard(cached, first_line(error))

        def make(path: Path) -> Any:
            options = session_options(self._config)
            options.optimized_model_filepath = str(path)
            # ONNX Runtime warns that the graph suits this machine only; the cache key has the machine in it.
            options.log_severity_level = 3
            return new_session(str(self._file), options, chosen)

        return cache.write(make)

    def close(self) -> None:
        """Do nothing: instances share nothing."""


class OnnxInstance:
    """One session.

    It has two ways to run, because IO binding does not help on the CPU. Microseconds of CPU time for one `compute`, by
    `run` and with IO binding (median of 30 rounds of 200, alternating; ONNX Runtime 1.31, one thread, Neoverse-N1):

        MLP 16-256-256-16, 1 row         25    42
        the same, 64 rows               296   319
        600 KB image in, 3 numbers out   47    64
        600 KB image in and out          53    67

    IO binding is used for models on a GPU, so that outputs are copied to the host as part of the run, and for models with
    BF16, which numpy has no type for. Strings cannot be bound.
    """

    def __init__(self, config: ModelConfig, session: Any, signature: Signature, *, bound: bool = False) -> None:
        self._name = config.name
        self._session = session
        self._run_options = run_options(config)
        inputs = {**signature.inputs, **signature.optional}
        self._text_inputs = frozenset(name for name, port in inputs.items() if port.dtype is BYTES)
        self._text_outputs = frozenset(name for name, port in signature.outputs.items() if port.dtype is BYTES)
        self._bf16_inputs = frozenset(name for name, port in inputs.items() if port.dtype is BF16)
        self._bf16_outputs = frozenset(name for name, port in signature.outputs.items() if port.dtype is BF16)
        has_bf16 = bool(self._bf16_inputs or self._bf16_outputs)
        has_text = bool(self._text_inputs or self._text_outputs)
        if has_bf16 and has_text:
            raise Unimplemented(
                f"model '{config.name}' has both BF16 and string tensors, and ONNX Runtime's Python interface has no call "
                "that takes both: have the model cast one of them"
            )
        self._inputs = inputs
        self._bound = (bound or has_bf16) and not has_text

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch."""
        return self._compute(inputs, list(requested))

    def _compute(
        self, inputs: Mapping[str, Array], names: list[str], *, on_device: bool = False
    ) -> Mapping[str, Array]:
        feed = inputs if isinstance(inputs, dict) else dict(inputs)
        if self._text_inputs:
            # Given bytes, ONNX Runtime would compute with their `repr`.
            feed = {
                name: np.array(decode_text(name, array), object).reshape(array.shape)
                if name in self._text_inputs
                else array
                for name, array in feed.items()
            }
        try:
            if self._bound:
                outputs = self._run_bound(feed, names, on_device=on_device)
            else:
                outputs = dict(zip(names, self._session.run(names, feed, self._run_options), strict=True))
        except Exception as error:
            client_error = self._client_error(error, inputs)
            level = logging.ERROR if isinstance(client_error, Internal) else logging.WARNING
            log.log(level, "model %s could not compute a batch: %s", self._name, first_line(error))
            log.debug("model %s: traceback of the error", self._name, exc_info=error)
            raise client_error from None
        for name in self._text_outputs.intersection(names):
            text = outputs[name]
            outputs[name] = np.array([item.encode() for item in text.ravel()], object).reshape(text.shape)
        return outputs

    def close(self) -> None:
        """Release the session with its weights and memory."""
        self._session = None

    def _client_error(self, error: Exception, inputs: Mapping[str, Array]) -> HeadraceError:
        """Return the error for the client. ONNX Runtime's text reveals the model's internals and goes to the log only."""
        shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in inputs.items())
        # Decided by the shapes and not by the exception: a bound run raises RuntimeError for everything.
        if not all(self._inputs[name].takes(array.shape) for name, array in inputs.items() if name in self._inputs):
            return InvalidArgument(
                f"model '{self._name}' does not accept inputs of these shapes: {shapes}. Compare them with the model's "
                "metadata; the server's log says where it stopped"
            )
        if isinstance(error, OrtInvalidArgument):
            return InvalidArgument(
                f"model '{self._name}' does not accept these inputs, of shapes {shapes}: a value is outside the range "
                "that the model was made for, such as an index past the end of a table, or sizes do not go together; the "
                "server's log says where it stopped"
            )
        return Internal(f"model '{self._name}' failed to compute this request; the server's log has the details")

    def _run_bound(self, feed: Mapping[str, Array], names: list[str], *, on_device: bool) -> dict[str, Array]:
        # A new binding for each batch: a kept one would keep the last batch's memory alive.
        binding = self._session.io_binding()
        bound = [self._bind_input(binding, name, array) for name, array in feed.items()]
        for name in names:
            self._bind_output(binding, name, on_device=on_device)
        self._session.run_with_iobinding(binding, self._run_options)
        del bound  # bound by address: kept until here
        return {
            name: self._output(name, value, on_device=on_device)
            for name, value in zip(names, binding.get_outputs(), strict=True)
        }

    def _bind_input(self, binding: Any, name: str, array: Array) -> Any:
        """Bind an input; return what has to be kept during the run."""
        # `ascontiguousarray` would add a dimension to a scalar.
        contiguous = array if array.flags.c_contiguous else array.copy()
        if name in self._bf16_inputs:
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(contiguous, _BFLOAT16)
            binding.bind_ortvalue_input(name, value)
        else:
            binding.bind_cpu_input(name, contiguous)
        return contiguous

    def _bind_output(self, binding: Any, name: str, *, on_device: bool) -> None:
        binding.bind_output(name, "cpu")

    def _output(self, name: str, value: Any, *, on_device: bool) -> Array:
        return _bf16_bits(value) if name in self._bf16_outputs else value.numpy()


class OnnxCudaInstance(OnnxInstance):
    """A session on a GPU. Between the steps of an ensemble its tensors stay there, if PyTorch with CUDA is installed."""

    def __init__(self, config: ModelConfig, session: Any, signature: Signature, device: int) -> None:
        super().__init__(config, session, signature, bound=True)
        self._device = device
        self._output_types = {name: port.dtype for name, port in signature.outputs.items()}

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch, with inputs on the host or in GPU memory."""
        if not self._bound:  # strings: everything is copied to the host
            inputs = {name: np.asarray(array) for name, array in inputs.items()}
        return self._compute(inputs, list(requested))

    def compute_on_device(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch and leave its outputs in GPU memory, if PyTorch can slice and join them there."""
        if not self._bound or not _torch_uses_cuda():
            return self.compute(inputs, requested)
        return self._compute(inputs, list(requested), on_device=True)

    def _bind_input(self, binding: Any, name: str, array: Any) -> Any:
        if isinstance(array, np.ndarray):
            return super()._bind_input(binding, name, array)
        tensor = array.tensor.contiguous()
        dtype = _BFLOAT16 if name in self._bf16_inputs else array.dtype
        binding.bind_input(name, "cuda", tensor.device.index, dtype, list(tensor.shape), tensor.data_ptr())
        return tensor

    def _bind_output(self, binding: Any, name: str, *, on_device: bool) -> None:
        if on_device:
            binding.bind_output(name, "cuda", self._device)
        else:
            super()._bind_output(binding, name, on_device=False)

    def _output(self, name: str, value: Any, *, on_device: bool) -> Array:
        dtype = self._output_types[name]
        if not on_device or dtype is None:
            return super()._output(name, value, on_device=False)
        from headrace.backends.device_array import wrap_memory

        array: Any = wrap_memory(value, value.data_ptr(), value.shape(), dtype, self._device)
        return cast("Array", array)


@cache
def _torch_uses_cuda() -> bool:
    try:
        from headrace.backends.torch_import import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _model_file(config: ModelConfig, files: ModelFiles) -> Path:
    """Return the graph file. `cc_model_filenames` is ignored: ONNX Runtime does not report a GPU's compute capability."""
    path = model_path(config, files, DEFAULT_FILENAME)
    # A model with external data may be a folder of that name, with the graph in a file of the same name.
    if not path.is_dir():
        return path
    inside = (path / path.name).relative_to(files.version_folder)
    return named_path(config, files, str(inside), "default_model_filename")


def _bf16_bits(value: Any) -> Array:
    """Return the 16 bits of each element. `OrtValue.numpy` raises, since numpy has no BF16."""
    shape = tuple(value.shape())
    bits = np.empty(shape, np.uint16)
    if bits.size:
        ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits
