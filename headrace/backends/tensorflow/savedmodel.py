# SPDX-License-Identifier: Apache-2.0
"""Reads SavedModels, those of TensorFlow 1 too: a folder with graphs, variables and assets.

Called by `backends.tensorflow.backend`. Inputs and outputs are the keys of a signature. TensorFlow's own loader is not
used: it would read the file again after it was checked, and build Python objects that only training needs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf.message import DecodeError

from headrace.backends.signature import Port, Signature
from headrace.backends.tensorflow.assets import check_tables
from headrace.backends.tensorflow.function import Function, Step, check_told, imported, port_of
from headrace.backends.tensorflow.operators import check_operators, check_reached, reached_at_the_top
from headrace.backends.tensorflow.runtime import AssetFileDef, SavedModel, tf
from headrace.backends.tensorflow.settings import allows_files, graph_tags, signature_name
from headrace.backends.tensorflow.variables import has_variables, restoring
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

FOLDER = "model.savedmodel"
DEFAULT_SIGNATURE = "serving_default"

_PROGRAM = "saved_model.pb"
_INIT = "__saved_model_init_op"
_NOT_FOR_SERVING = (_INIT, "__saved_model_train_op")


def read_savedmodel(config: ModelConfig, folder: Path, device: str | None) -> Function:
    """The function that the configuration means."""
    meta = _graph(config, folder)
    chosen = _signature(config, meta)
    feeds, fetches = _tensors(chosen.inputs), _tensors(chosen.outputs)
    graph_def, files_allowed = meta.graph_def, allows_files(config)
    restore, init = meta.saver_def.restore_op_name, _init_operation(meta)
    assets = _assets(config, folder, meta)
    check_operators(config, graph_def, files_allowed=files_allowed)
    asked = [*fetches.values(), *([init] if init else [])]
    check_reached(config, graph_def, asked, restoring=False, files_allowed=files_allowed)
    if restore:
        check_reached(config, graph_def, [restore], restoring=True, files_allowed=files_allowed)
    if not files_allowed:
        check_tables(config, graph_def, assets, fetches.values())
    graph = imported(config, folder.name, graph_def, device, known_operators=meta.meta_info_def.stripped_op_list)
    signature = _described(chosen)
    _check_tensors(config, graph, {**feeds, **fetches}, {**signature.inputs, **signature.optional, **signature.outputs})
    setup: list[Step] = []
    if has_variables(config, folder, graph_def):
        setup.extend(restoring(config, folder, meta, graph, fetches.values(), init, assets))
    if init and _does_something(graph_def, init):
        setup.append(Step(init, assets))
    fetches = _apart(graph, feeds, fetches)
    return Function(folder.name, graph, signature, feeds, fetches, tuple(setup), dict(chosen.defaults))


def describe_savedmodel(config: ModelConfig, folder: Path) -> Signature:
    """What it takes and gives."""
    chosen = _signature(config, _graph(config, folder))
    check_told(
        config,
        {name: _shape(info) for name, info in (*chosen.inputs.items(), *chosen.outputs.items())},
    )
    return _described(chosen)


def _graph(config: ModelConfig, folder: Path) -> Any:
    """The MetaGraphDef with the tags that the configuration means."""
    path = folder / _PROGRAM
    if not folder.is_dir():
        raise InvalidArgument(
            f"model '{config.name}': '{folder.name}' is a file, and a tensorflow_savedmodel is a folder: say platform: "
            '"tensorflow_graphdef" if it is a frozen graph'
        )
    if not path.is_file():
        raise FailedPrecondition(
            f"model '{config.name}' has no file '{_PROGRAM}' in '{folder.name}': put the whole folder there that "
            "tf.saved_model.save wrote"
        )
    try:
        graphs = SavedModel.FromString(path.read_bytes()).meta_graphs
    except DecodeError:
        graphs = ()
    except OSError as error:
        log.exception("model %s: %s could not be read", config.name, path)
        raise FailedPrecondition(
            f"model '{config.name}': '{folder.name}/{_PROGRAM}' cannot be read ({error.strerror}): check its permissions"
        ) from None
    if not graphs:
        raise InvalidArgument(
            f"model '{config.name}': TensorFlow {tf.__version__} cannot read '{folder.name}/{_PROGRAM}'. It is empty, "
            "damaged, or not a SavedModel: save the model again"
        )
    tags = graph_tags(config)
    for meta in graphs:
        if tags == set(meta.meta_info_def.tags):
            return meta
    present = "; ".join(", ".join(sorted(meta.meta_info_def.tags)) or "none" for meta in graphs)
    raise InvalidArgument(
        f"model '{config.name}' has no graph with the tags {', '.join(sorted(tags))}: it has {present[:500]}. Set the "
        "parameter TF_GRAPH_TAG to the tags of one, with commas"
    )


def _signature(config: ModelConfig, meta: Any) -> Any:
    signatures = meta.signature_def
    name = signature_name(config)
    usable = sorted(key for key in signatures if key not in _NOT_FOR_SERVING)
    if name is None and DEFAULT_SIGNATURE not in usable and len(usable) == 1:
        name = usable[0]
    name = DEFAULT_SIGNATURE if name is None else name
    if name not in signatures:
        present = ", ".join(usable)[:500] or "none: save it with signatures="
        raise InvalidArgument(
            f"model '{config.name}' has no signature '{name[:128]}': it has {present}. Set the parameter TF_SIGNATURE_DEF"
        )
    if not signatures[name].outputs:
        raise InvalidArgument(f"signature '{name[:128]}' of model '{config.name}' has no outputs: choose another")
    return signatures[name]


def _described(chosen: Any) -> Signature:
    inputs = {name: _port(name, info) for name, info in chosen.inputs.items()}
    return Signature(
        {name: port for name, port in inputs.items() if name not in chosen.defaults},
        {name: _port(name, info) for name, info in chosen.outputs.items()},
        {name: port for name, port in inputs.items() if name in chosen.defaults},
    )


def _port(name: str, info: Any) -> Port:
    if info.WhichOneof("encoding") not in ("name", None):
        return Port(name, "sparse or composite tensor", None, None)
    try:
        return port_of(name, tf.as_dtype(info.dtype), _shape(info))
    except TypeError:
        return Port(name, f"tensor of type {info.dtype}", None, None)


def _shape(info: Any) -> Any:
    try:
        return tf.TensorShape(info.tensor_shape)
    except ValueError:
        # Sizes that are none.
        return tf.TensorShape(None)


def _tensors(infos: Mapping[str, Any]) -> dict[str, str]:
    return {name: info.name for name, info in infos.items() if info.name}


def _check_tensors(config: ModelConfig, graph: Any, tensors: Mapping[str, str], ports: Mapping[str, Port]) -> None:
    """Hold the signature against the graph: arrays are made by the one and computed by the other."""
    for name, tensor in tensors.items():
        try:
            kind = graph.get_tensor_by_name(tensor).dtype.base_dtype.name
        except (KeyError, ValueError):
            kind = None
        if kind != ports[name].kind:
            raise InvalidArgument(
                f"model '{config.name}': its signature says that '{name[:128]}' is the tensor '{tensor[:128]}' of type "
                f"{ports[name].kind}, which its graph does not have. The file is damaged: save the model again"
            )


def _apart(graph: Any, feeds: Mapping[str, str], fetches: Mapping[str, str]) -> dict[str, str]:
    """The outputs, with a tensor of its own for each that is also an input, which TensorFlow would refuse."""
    fed = set(feeds.values())
    apart = {}
    for name, tensor in fetches.items():
        if tensor in fed:
            with graph.as_default():
                apart[name] = tf.identity(graph.get_tensor_by_name(tensor)).name
        else:
            apart[name] = tensor
    return apart


def _init_operation(meta: Any) -> str:
    """What fills the tables; each age of TensorFlow has kept it elsewhere."""
    if _INIT in meta.signature_def:
        return str(meta.signature_def[_INIT].outputs[_INIT].name).partition(":")[0]
    for collection in ("saved_model_main_op", "legacy_init_op"):
        names = meta.collection_def[collection].node_list.value if collection in meta.collection_def else ()
        if names:
            return str(names[0]).partition(":")[0]
    return ""


def _does_something(graph_def: Any, init: str) -> bool:
    """Most models have no tables: what would fill them is empty, and TensorFlow takes as long over it as over a graph."""
    reached = [node.op for node in reached_at_the_top(graph_def, [init])]
    # What is not there at all is TensorFlow's to refuse.
    return not reached or any(operator != "NoOp" for operator in reached)


def _assets(config: ModelConfig, folder: Path, meta: Any) -> dict[str, str]:
    """The path of each asset, by the tensor that takes it."""
    listed = list(meta.asset_file_def)
    if not listed and "saved_model_assets" in meta.collection_def:
        for packed in meta.collection_def["saved_model_assets"].any_list.value:
            asset = AssetFileDef()
            if packed.Unpack(asset):
                listed.append(asset)
    paths = {}
    for asset in listed:
        relative = PurePosixPath(asset.filename)
        path = folder / "assets" / relative
        if relative.is_absolute() or ".." in relative.parts or not path.is_file():
            raise InvalidArgument(
                f"model '{config.name}' has no file '{folder.name}/assets/{asset.filename[:128]}', which its graph "
                "reads: put the whole folder there that tf.saved_model.save wrote"
            )
        paths[asset.tensor_info.name] = str(path)
    return paths
