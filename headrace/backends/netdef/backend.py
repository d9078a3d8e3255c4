# SPDX-License-Identifier: Apache-2.0
"""The Caffe2 backend (`netdef`), on the CPU or a GPU.

Opening an instance translates the net to ONNX; the ONNX backend's instances run it, so its parameters apply here too
(`backends.onnx.session`). Nets contain neither types nor shapes of their inputs: the configuration must.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.model_config import model_path
from headrace.backends.netdef.files import DEFAULT_FILENAME, Pair, init_path, read_pair
from headrace.backends.netdef.translation import ELEM_TYPES, InputTensor, translate
from headrace.backends.onnx.backend import OnnxBackend, OnnxInstance, OnnxModel
from headrace.backends.onnx.session import session_options
from headrace.backends.signature import Port, Signature, completion, is_declared
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, with_message
from headrace.models.config.types import ModelConfig, SequenceBatching

log = logging.getLogger("headrace.backends")


class NetDefBackend:
    """`backend: "netdef"`, or `platform: "caffe2_netdef"`."""

    def usable_gpus(self, present: int) -> int:
        """Return all GPUs if this build of ONNX Runtime supports GPUs, else 0."""
        return OnnxBackend().usable_gpus(present)

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return the outputs, if the configuration declares the inputs."""
        if is_declared(config):
            return None
        path = model_path(config, files, DEFAULT_FILENAME)
        try:
            pair = read_pair(path)
            _check_declared(config, pair)
            model = translate(pair, list(declared_inputs(config)), [spec.name for spec in config.outputs])
        except HeadraceError as error:
            raise with_message(error, f"model '{config.name}': {error.message}") from None
        return completion(config, signature_of(model.graph))

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> NetDefModel:
        """Find the files and check the settings. Each instance reads the files into its own session."""
        session_options(config)
        path = model_path(config, files, DEFAULT_FILENAME)
        if not init_path(path).exists():
            shown = init_path(path).relative_to(files.model_folder.parent)
            raise FailedPrecondition(
                f"model '{config.name}' version {files.version} has no file '{shown}': a Caffe2 model is two files, put "
                "the one with the weights there"
            )
        return NetDefModel(config, path)


class NetDefModel:
    """One version: a pair of files."""

    def __init__(self, config: ModelConfig, path: Path) -> None:
        self._config = config
        self._path = path

    def open(self, placement: Placement) -> OnnxInstance:
        """Translate the net and open a session with it.

        Each instance translates again: keeping the result would take as much memory as the weights, for instances that
        may never open.
        """
        try:
            outputs = [*(spec.name for spec in self._config.outputs), *_state_outputs(self._config)]
            # The pair has no name here, so that it is freed before the graph is written: each is as large as the weights.
            model = translate(read_pair(self._path), list(declared_inputs(self._config)), outputs)
        except HeadraceError as error:
            raise with_message(error, f"model '{self._config.name}': {error.message}") from None
        content = model.SerializeToString()
        del model
        return OnnxModel(self._config, self._path, content=content).open(placement)

    def close(self) -> None:
        """Do nothing: instances share nothing."""


def declared_inputs(config: ModelConfig) -> Iterator[InputTensor]:
    """Yield every input of the configuration as the net sees it: with the batch, and after a reshape."""
    batch = (-1,) if config.max_batch_size > 0 else ()
    for spec in config.inputs:
        if spec.dtype is None:
            raise InvalidArgument(f"input '{spec.name}' has no data_type, which a NetDef does not contain: add it")
        dims = spec.dims if spec.reshape is None else spec.reshape
        known = dims is not None and not spec.allow_ragged_batch
        yield InputTensor(spec.name, spec.dtype, (*batch, *dims) if known and dims is not None else None)
    if isinstance(config.scheduling, SequenceBatching):
        for control in config.scheduling.controls:
            yield InputTensor(control.name, control.dtype, None)
        for state in config.scheduling.states:
            yield InputTensor(state.input_name, state.dtype, (*batch, *state.dims))
    for batch_input in config.batch_inputs:
        for name in batch_input.target_names:
            yield InputTensor(name, batch_input.dtype, None)


def signature_of(graph: Any) -> Signature:
    """Return the signature of a translated graph."""
    return Signature(_ports(graph.input), _ports(graph.output), {})


def _ports(values: Any) -> dict[str, Port]:
    dtypes = {number: dtype for dtype, number in ELEM_TYPES.items()}
    ports = {}
    for value in values:
        kind = value.type.tensor_type
        shape = tuple(size.dim_value if size.HasField("dim_value") else -1 for size in kind.shape.dim)
        ports[value.name] = Port(value.name, "tensor", dtypes.get(kind.elem_type), shape or None)
    return ports


def _state_outputs(config: ModelConfig) -> Iterator[str]:
    if isinstance(config.scheduling, SequenceBatching):
        for state in config.scheduling.states:
            yield state.output_name


def _check_declared(config: ModelConfig, pair: Pair) -> None:
    if config.inputs and all(spec.dtype is not None and spec.dims for spec in config.inputs):
        return
    filled = {blob for operator in pair.init.operators for blob in operator.outputs}
    names = [name for name in pair.net.external_inputs if name not in filled] or list(pair.net.external_inputs[:1])
    shown = ", ".join(f"'{name}'" for name in names[:16])
    raise InvalidArgument(
        f"a NetDef does not contain the types and shapes of its inputs: declare {shown or 'them'} in `input`, "
        "with data_type and dims"
    )
