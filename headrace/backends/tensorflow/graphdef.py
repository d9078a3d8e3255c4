# SPDX-License-Identifier: Apache-2.0
"""A reader of frozen graphs: files with one serialised GraphDef.

Inputs are the names of Placeholder nodes, outputs those of any other nodes, without the ":0" of a node's first tensor;
a node's other tensors are `node:1` and so on.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from headrace.backends.contract import ModelFiles
from headrace.backends.signature import Port, Signature
from headrace.backends.tensorflow.function import (
    Function,
    Step,
    check_shapes_known,
    declared_outputs,
    free_graph,
    import_graph,
    port_of,
)
from headrace.backends.tensorflow.operators import check_operators, check_reached, node_name, reached_nodes
from headrace.backends.tensorflow.runtime import tf
from headrace.backends.tensorflow.session import allows_files
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

FILENAME = "model.graphdef"

_INPUT = "Placeholder"
_OPTIONAL_INPUT = "PlaceholderWithDefault"
_NO_RESULT = frozenset({"Const", _INPUT, _OPTIONAL_INPUT})


def read_graphdef(config: ModelConfig, files: ModelFiles, path: Path, device: str | None) -> Function:
    """Read the graph with the inputs and outputs of the configuration."""
    graph_def = _parsed(config, path)
    setup = tuple(Step(name) for name in _init_operations(config, files))
    nodes = {node.name: node for node in graph_def.node}
    for step in setup:
        if step.operation not in nodes:
            raise InvalidArgument(f"model '{config.name}' has no operation '{step.operation[:128]}' to begin with")
    ends = _ends(graph_def)
    wanted = list(dict.fromkeys(declared_outputs(config))) or ends
    targets = [*wanted, *(step.operation for step in setup)]
    files_allowed = allows_files(config)
    check_operators(config, graph_def, files_allowed=files_allowed)
    check_reached(config, graph_def, targets, restoring=False, files_allowed=files_allowed)
    needed = {node.name for node in reached_nodes(graph_def, targets)}
    inputs = [node.name for node in graph_def.node if node.op == _INPUT]
    optional = [node.name for node in graph_def.node if node.op == _OPTIONAL_INPUT]
    if not inputs and not optional:
        raise InvalidArgument(
            f"model '{config.name}': '{path.name}' has no Placeholder node, so nothing can be given to it: freeze the "
            "graph with its inputs as placeholders"
        )
    graph = import_graph(config, path.name, graph_def, device)
    taken = _ports(graph, [*inputs, *optional])
    given = _ports(graph, [name for name in dict.fromkeys((*wanted, *ends)) if node_name(name) not in taken])
    signature = Signature(
        {name: taken[name] for name in inputs if name in needed},
        given,
        {name: taken[name] for name in (*inputs, *optional) if name not in needed or name in optional},
    )
    feeds = {name: _tensor(name) for name in taken}
    return Function(path.name, graph, signature, feeds, {name: _tensor(name) for name in given}, setup)


def describe_graphdef(config: ModelConfig, files: ModelFiles, path: Path) -> Signature:
    """Return the signature: the placeholders that are needed, and the nodes whose output no other node reads."""
    function = read_graphdef(config, files, path, "/device:CPU:0")
    tensors = {**function.feeds, **function.fetches}
    signature = function.signature
    ports = (*signature.inputs, *signature.outputs)
    shapes = {name: function.graph.get_tensor_by_name(tensors[name]).shape for name in ports}
    free_graph(function.graph)
    check_shapes_known(config, shapes)
    return signature


def _parsed(config: ModelConfig, path: Path) -> Any:
    if path.is_dir():
        raise InvalidArgument(
            f"model '{config.name}': '{path.name}' is a folder, and a tensorflow_graphdef is one file: say platform: "
            '"tensorflow_savedmodel" if it is a SavedModel'
        )
    try:
        graph_def = tf.compat.v1.GraphDef.FromString(path.read_bytes())
    except DecodeError:
        raise _unreadable(config, path) from None
    except OSError as error:
        log.exception("model %s: %s could not be read", config.name, path)
        raise FailedPrecondition(
            f"model '{config.name}': '{path.name}' cannot be read ({error.strerror}): check its permissions"
        ) from None
    if not graph_def.node:
        raise _unreadable(config, path)
    return graph_def


def _unreadable(config: ModelConfig, path: Path) -> InvalidArgument:
    return InvalidArgument(
        f"model '{config.name}': TensorFlow {tf.__version__} cannot read '{path.name}'. It is empty, damaged, or not a "
        "binary GraphDef: freeze the graph and write its SerializeToString()"
    )


def _init_operations(config: ModelConfig, files: ModelFiles) -> list[str]:
    """Return the operations listed in TF_INIT_OPS_FILE, a file in the version's folder or else in the model's."""
    name = config.parameters.get("TF_INIT_OPS_FILE")
    if not name:
        return []
    if Path(name).name != name:
        raise InvalidArgument(f"parameter TF_INIT_OPS_FILE is '{name[:128]}': use the name of a file without folders")
    for folder in (files.version_folder, files.model_folder):
        if (folder / name).is_file():
            break
    else:
        raise FailedPrecondition(f"model '{config.name}' has no file '{name[:128]}', which TF_INIT_OPS_FILE names")
    try:
        listed = json.loads((folder / name).read_bytes())["init_ops"]
        if isinstance(listed, list) and all(isinstance(operation, str) for operation in listed):
            return listed
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise InvalidArgument(
        f"'{name[:128]}' of model '{config.name}' is not what TF_INIT_OPS_FILE needs: write " + '{"init_ops": ["name"]}'
    )


def _ends(graph_def: Any) -> list[str]:
    """Return the nodes whose first tensor no other node reads."""
    used = {node_name(source) for node in graph_def.node for source in node.input}
    return [node.name for node in graph_def.node if node.name not in used and node.op not in _NO_RESULT]


def _ports(graph: Any, names: list[str]) -> dict[str, Port]:
    """Return the known tensors of these names; the check of the configuration reports the others."""
    ports = {}
    for name in names:
        try:
            tensor = graph.get_tensor_by_name(_tensor(name))
        except (KeyError, ValueError):
            # Some nodes, such as NoOp, have no output tensor.
            continue
        ports[name] = port_of(name, tensor.dtype, tensor.shape)
    return ports


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"
