# SPDX-License-Identifier: Apache-2.0
"""Models in Caffe2's format, on the CPU or a GPU.

Called by the engine through `backends.contract`. A net is translated to ONNX when an instance is opened; from there on
it is ONNX Runtime's, by the ONNX backend's own instances, so that its parameters are possible here too
(`backends.onnx.settings`). The nets tell neither the types nor the shapes of their inputs: the configuration must.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.model_files import model_path
from headrace.backends.netdef.files import DEFAULT_FILENAME, Pair, init_path, read_pair
from headrace.backends.netdef.translation import ELEM_TYPES, InputTensor, translate
from headrace.backends.onnx.backend import OnnxBackend, OnnxInstance, OnnxModel
from headrace.backends.onnx.settings import session_options
from headrace.backends.signature import Port, Signature, completion, is_declared
from headrace.core.dtypes import DTYPES
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, retold
from headrace.models.config.types import ModelConfig, SequenceBatching

log = logging.getLogger("headrace.backends")


class NetDefBackend:
    """`backend: "netdef"`, or `platform: "caffe2_netdef"`."""

    def usable_gpus(self, present: int) -> int:
        """All, if this build of ONNX Runtime can compute on any."""
        return OnnxBackend().usable_gpus(present)

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """The outputs, once the inputs are declared; what those are only the configuration can tell."""
        if is_declared(config):
            return None
        path = model_path(config, files, DEFAULT_FILENAME)
        try:
            pair = read_pair(path)
            _check_declared(config, pair)
            model = translate(pair, list(declared_inputs(config)), [spec.name for spec in config.outputs])
        except HeadraceError as error:
            raise retold(error, f"model '{config.name}': {error.message}") from None
        return completion(config, signature_of(model.graph))

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> NetDefModel:
        """Find the files and check the settings. The files are read by the instances, each into its own session."""
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

        Each instance translates again: what is read would otherwise stay in memory, as large as the weights, for
        instances that may never come.
        """
        try:
            outputs = [*(spec.name for spec in self._config.outputs), *_state_outputs(self._config)]
            # The pair has no name here, so that it is gone before the graph is written: each is as large as the weights.
            model = translate(read_pair(self._path), list(declared_inputs(self._config)), outputs)
        except HeadraceError as error:
            raise retold(error, f"model '{self._config.name}': {error.message}") from None
        content = model.SerializeToString()
        del model
        return OnnxModel(self._config, self._path, content=content).open(placement)

    def close(self) -> None:
        """Nothing is shared."""


def declared_inputs(config: ModelConfig) -> Iterator[InputTensor]:
    """Every input that the configuration has, as the net sees it: with the batch, and after a reshape."""
    batch = (-1,) if config.max_batch_size > 0 else ()
    for spec in config.inputs:
        if spec.dtype is None:
            raise InvalidArgument(f"input '{spec.name}' has no data_type, which a NetDef does not tell: add it")
        dims = spec.dims if spec.reshape is None else spec.reshape
        known = dims is not None and not spec.allow_ragged_batch
        yield InputTensor(spec.name, spec.dtype, (*batch, *dims) if known and dims is not None else None)
    if isinstance(config.scheduling, SequenceBatching):
        for control in config.scheduling.controls:
            yield InputTensor(control.name, control.dtype, None)
        for state in config.scheduling.states:
            yield InputTensor(state.input_name, state.dtype, (*batch, *state.dims))
    for made in config.batch_inputs:
        for name in made.target_names:
            yield InputTensor(name, made.dtype, None)


def signature_of(graph: Any) -> Signature:
    """What a translated graph takes and gives."""
    return Signature(_ports(graph.input), _ports(graph.output), {})


def _ports(values: Any) -> dict[str, Port]:
    dtypes = {number: DTYPES[name] for name, number in ELEM_TYPES.items()}
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
        f"a NetDef does not tell the types and shapes of its inputs: declare {shown or 'them'} in `input`, with data_type "
        "and dims"
    )
