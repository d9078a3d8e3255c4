# SPDX-License-Identifier: Apache-2.0
"""A reader of SavedModels (also those of TensorFlow 1): graph, variables and assets."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf.message import DecodeError

from headrace.backends.signature import Port, Signature
from headrace.backends.tensorflow.function import Function, Step, check_shapes_known, import_graph, port_of
from headrace.backends.tensorflow.operators import (
    called_functions,
    check_operators,
    check_reached,
    node_name,
    reached_in_main_graph,
    reached_nodes,
)
from headrace.backends.tensorflow.runtime import AssetFileDef, SavedModel, TrackableObjectGraph, tf
from headrace.backends.tensorflow.session import allows_files, graph_tags, signature_name
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig

_TABLES = {"InitializeTableFromTextFile": 1, "InitializeTableFromTextFileV2": 1}
"""The position of the file name among the inputs."""
_PASSING = frozenset({"Identity"})
_VARIABLE_USERS = frozenset({"AssignVariableOp", "ReadVariableOp", "VarIsInitializedOp"})
_CALLING = frozenset({"PartitionedCall", "StatefulPartitionedCall"})

_Place = tuple[str, str]
"""A function ("" for the main graph) and a tensor in it."""


def check_tables(config: ModelConfig, graph: Any, assets: Collection[str], outputs: Collection[str]) -> None:
    """Reject a table initialised from a file that is not among the `assets`, which are tensors of the graph."""
    names = _FileNames(graph, {node_name(tensor) for tensor in assets})
    foreign = list(names.foreign_tables())
    # The asset tensors hold the right paths only during initialisation, not when the model runs.
    foreign.extend(node for node in reached_nodes(graph, outputs) if node.op in _TABLES)
    for node in foreign:
        raise InvalidArgument(
            f"model '{config.name}' has a node '{node.name[:128]}' of type {node.op}, which reads a file that is not one "
            "of the model's assets: save the model with the file as an asset, or, if you trust the model, set the "
            "parameter allow_file_operators to 1"
        )


class _FileNames:
    """Traces file names through one graph."""

    def __init__(self, graph: Any, assets: Collection[str]) -> None:
        self._assets = assets
        self._functions = {function.signature.name: function for function in graph.library.function}
        self._scopes = {"": {node.name: node for node in graph.node}}
        for name, function in self._functions.items():
            self._scopes[name] = {node.name: node for node in function.node_def}

    def foreign_tables(self) -> Iterator[Any]:
        """Yield the nodes that initialise a table from a file that is not an asset."""
        for scope, nodes in self._scopes.items():
            for node in nodes.values():
                if node.op in _TABLES and not self._is_asset((scope, node.input[_TABLES[node.op]])):
                    yield node

    def _is_asset(self, place: _Place) -> bool:
        waiting, seen = [place], {place}
        while waiting:
            sources = self._sources(*waiting.pop())
            if sources is None:
                return False
            for source in sources:
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return True

    def _sources(self, scope: str, tensor: str) -> list[_Place] | None:
        """Return the sources of a value: none if it is an asset, None if the graph computes it."""
        name = node_name(tensor)
        node = self._scopes[scope].get(name)
        if node is None:
            return list(self._arguments(scope, name)) if scope else None
        if not scope and name in self._assets:
            return []
        if node.op in _PASSING:
            return [(scope, node.input[0])]
        if node.op == "ReadVariableOp":
            return self._assigned(scope, node.input[0])
        return None

    def _arguments(self, called: str, argument: str) -> Iterator[_Place]:
        """Yield what callers pass to a function; nothing if it is never called, because then it does not run."""
        names = [spec.name for spec in self._functions[called].signature.input_arg]
        for scope, nodes in self._scopes.items():
            for node in nodes.values():
                if called not in called_functions(node, self._functions):
                    continue
                # Loops and conditions have their own arguments first.
                index = names.index(argument) if argument in names and node.op in _CALLING else -1
                given = [source for source in node.input if not source.startswith("^")]
                yield (scope, given[index]) if 0 <= index < len(given) else ("", "")

    def _assigned(self, scope: str, handle: str) -> list[_Place] | None:
        """Return the values assigned to a variable, if it is local to the graph."""
        variable = node_name(handle)
        node = self._scopes[scope].get(variable)
        if scope or node is None or node.op != "VarHandleOp":
            return None
        shared = _shared_name(node)
        handles = [node for nodes in self._scopes.values() for node in nodes.values() if node.op == "VarHandleOp"]
        if sum(_shared_name(node) == shared for node in handles) != 1:
            return None
        users = [node for node in self._scopes[scope].values() if variable in map(node_name, node.input)]
        if any(node.op not in _VARIABLE_USERS for node in users):
            return None
        return [(scope, node.input[1]) for node in users if node.op == "AssignVariableOp"] or None


def _shared_name(node: Any) -> str:
    return str(node.attr["shared_name"].s.decode(errors="replace") or node.name)


log = logging.getLogger("headrace.backends")

_VARIABLE = "VarHandleOp"
_KINDS = frozenset({_VARIABLE, "VariableV2", "Variable"})
_NAMES = "_CHECKPOINTABLE_OBJECT_GRAPH"


def has_variables(config: ModelConfig, folder: Path, graph_def: Any) -> bool:
    """Return whether there are values to restore. Reject a model whose variable files are missing."""
    if any((folder / "variables").glob("variables*")):
        return True
    if any(node.op in _KINDS for node in graph_def.node):
        raise FailedPrecondition(
            f"model '{config.name}' has no files '{folder.name}/variables/variables.*', which hold its weights: put the "
            "whole folder there that tf.saved_model.save wrote"
        )
    return False


def restore_steps(
    config: ModelConfig,
    folder: Path,
    meta: Any,
    graph: Any,
    outputs: Collection[str],
    init: str,
    assets: Mapping[str, str],
) -> Iterator[Step]:
    """Yield the steps that restore the variables that the `outputs` need. May add nodes to the `graph`."""
    prefix = str(folder / "variables" / "variables")
    restore = meta.saver_def.restore_op_name
    needed = list(reached_in_main_graph(meta.graph_def, outputs))
    restored = {node.name for node in reached_in_main_graph(meta.graph_def, [restore])} if restore else set()
    filled = restored | set(_assigned(meta.graph_def, init))
    missing = [node for node in needed if node.op == _VARIABLE and node.name not in filled]
    # Does not copy weights that the outputs do not read.
    if restore and not (missing and restored.isdisjoint(node.name for node in needed)):
        yield Step(restore, {meta.saver_def.filename_tensor_name: prefix, **assets})
    if missing:
        yield _restore_steps_by_name(config, folder, graph, missing, prefix)


def _assigned(graph_def: Any, init: str) -> Iterator[str]:
    """Yield the variables that the init operation assigns."""
    if init:
        for node in reached_in_main_graph(graph_def, [init]):
            if node.op == "AssignVariableOp":
                yield node_name(node.input[0])


def _restore_steps_by_name(config: ModelConfig, folder: Path, graph: Any, nodes: Sequence[Any], prefix: str) -> Step:
    keys = _checkpoint_keys(config, folder, prefix)
    names = [node.attr["shared_name"].s.decode(errors="replace") for node in nodes]
    unknown = next((name for name in names if len(keys.get(name, ())) != 1), None)
    if unknown is not None:
        raise InvalidArgument(
            f"model '{config.name}': '{folder.name}' does not say where the value of its variable '{unknown[:128]}' is. "
            "Save it with model.export(), if it is one of Keras's"
        )
    try:
        with graph.as_default():
            values = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=[keys[name][0] for name in names],
                shape_and_slices=[""] * len(names),
                dtypes=[tf.as_dtype(node.attr["dtype"].type) for node in nodes],
            )
            assigning = [
                tf.raw_ops.AssignVariableOp(resource=graph.get_tensor_by_name(f"{node.name}:0"), value=value)
                for node, value in zip(nodes, values, strict=True)
            ]
            return Step(tf.group(*assigning).name)
    except (TypeError, ValueError):
        log.exception("model %s: its variables do not fit its checkpoint", config.name)
        raise _damaged(config, folder) from None


def _checkpoint_keys(config: ModelConfig, folder: Path, prefix: str) -> dict[str, list[str]]:
    """Return the checkpoint keys of the variables, by variable name."""
    try:
        packed = tf.train.load_checkpoint(prefix).get_tensor(_NAMES)
        objects = TrackableObjectGraph.FromString(packed)
    except Exception:
        log.exception("model %s: the names in its checkpoint could not be read", config.name)
        raise _damaged(config, folder) from None
    keys: dict[str, list[str]] = {}
    for node in objects.nodes:
        for attribute in node.attributes:
            if attribute.checkpoint_key not in keys.setdefault(attribute.full_name, []):
                keys[attribute.full_name].append(attribute.checkpoint_key)
    return keys


def _damaged(config: ModelConfig, folder: Path) -> InvalidArgument:
    return InvalidArgument(
        f"model '{config.name}': TensorFlow {tf.__version__} cannot read '{folder.name}/variables'. They are damaged or "
        "not of this model; the server's log says which. Save the model again"
    )


FOLDER = "model.savedmodel"
DEFAULT_SIGNATURE = "serving_default"

_PROGRAM = "saved_model.pb"
_INIT = "__saved_model_init_op"
_NOT_FOR_SERVING = (_INIT, "__saved_model_train_op")


def read_savedmodel(config: ModelConfig, folder: Path, device: str | None) -> Function:
    """Read the function that the configuration selects."""
    meta = _graph(config, folder)
    chosen = _signature(config, meta)
    feeds, fetches = _tensors(chosen.inputs), _tensors(chosen.outputs)
    graph_def, files_allowed = meta.graph_def, allows_files(config)
    restore, init = meta.saver_def.restore_op_name, _init_operation(meta)
    assets = _assets(config, folder, meta)
    check_operators(config, graph_def, files_allowed=files_allowed)
    targets = [*fetches.values(), *([init] if init else [])]
    check_reached(config, graph_def, targets, restoring=False, files_allowed=files_allowed)
    if restore:
        check_reached(config, graph_def, [restore], restoring=True, files_allowed=files_allowed)
    if not files_allowed:
        check_tables(config, graph_def, assets, fetches.values())
    graph = import_graph(config, folder.name, graph_def, device, known_operators=meta.meta_info_def.stripped_op_list)
    signature = _describe(chosen)
    _check_tensors(config, graph, {**feeds, **fetches}, {**signature.inputs, **signature.optional, **signature.outputs})
    setup: list[Step] = []
    if has_variables(config, folder, graph_def):
        setup.extend(restore_steps(config, folder, meta, graph, fetches.values(), init, assets))
    if init and _has_effect(graph_def, init):
        setup.append(Step(init, assets))
    fetches = _copied_outputs(graph, feeds, fetches)
    return Function(folder.name, graph, signature, feeds, fetches, tuple(setup), dict(chosen.defaults))


def describe_savedmodel(config: ModelConfig, folder: Path) -> Signature:
    """Return the signature of the model."""
    chosen = _signature(config, _graph(config, folder))
    check_shapes_known(
        config,
        {name: _shape(info) for name, info in (*chosen.inputs.items(), *chosen.outputs.items())},
    )
    return _describe(chosen)


def _graph(config: ModelConfig, folder: Path) -> Any:
    """Return the MetaGraphDef with the tags that the configuration selects."""
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


def _describe(chosen: Any) -> Signature:
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
        # Invalid dimensions.
        return tf.TensorShape(None)


def _tensors(infos: Mapping[str, Any]) -> dict[str, str]:
    return {name: info.name for name, info in infos.items() if info.name}


def _check_tensors(config: ModelConfig, graph: Any, tensors: Mapping[str, str], ports: Mapping[str, Port]) -> None:
    """Check the signature against the graph: requests follow the signature, the session runs the graph."""
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


def _copied_outputs(graph: Any, feeds: Mapping[str, str], fetches: Mapping[str, str]) -> dict[str, str]:
    """Return the outputs; one that is also an input gets a tensor of its own, since TensorFlow rejects it otherwise."""
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
    """Return the operation that initialises the tables; each generation of TensorFlow stores it elsewhere."""
    if _INIT in meta.signature_def:
        return str(meta.signature_def[_INIT].outputs[_INIT].name).partition(":")[0]
    for collection in ("saved_model_main_op", "legacy_init_op"):
        names = meta.collection_def[collection].node_list.value if collection in meta.collection_def else ()
        if names:
            return str(names[0]).partition(":")[0]
    return ""


def _has_effect(graph_def: Any, init: str) -> bool:
    """Return whether an init operation does anything. Most models have no tables, and running an empty one is slow."""
    reached = [node.op for node in reached_in_main_graph(graph_def, [init])]
    # TensorFlow itself rejects a missing operation.
    return not reached or any(operator != "NoOp" for operator in reached)


def _assets(config: ModelConfig, folder: Path, meta: Any) -> dict[str, str]:
    """Return the path of each asset, by its tensor."""
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
