# SPDX-License-Identifier: Apache-2.0
"""How the variables of a SavedModel get their values.

Called by `backends.tensorflow.savedmodel`. A SavedModel has an operation that restores them. For models of Keras 3 that
`tf.saved_model.save` wrote, it fills copies that the signature does not read; the values are then found by the variables'
names in the checkpoint, as TensorFlow's own loader does.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.backends.tensorflow.function import Step
from headrace.backends.tensorflow.operators import node_name, reached_at_the_top
from headrace.backends.tensorflow.runtime import TrackableObjectGraph, tf
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

_VARIABLE = "VarHandleOp"
_KINDS = frozenset({_VARIABLE, "VariableV2", "Variable"})
_NAMES = "_CHECKPOINTABLE_OBJECT_GRAPH"


def has_variables(config: ModelConfig, folder: Path, graph_def: Any) -> bool:
    """Whether there are values to restore. Refuses a model that has lost them."""
    if any((folder / "variables").glob("variables*")):
        return True
    if any(node.op in _KINDS for node in graph_def.node):
        raise FailedPrecondition(
            f"model '{config.name}' has no files '{folder.name}/variables/variables.*', which hold its weights: put the "
            "whole folder there that tf.saved_model.save wrote"
        )
    return False


def restoring(
    config: ModelConfig,
    folder: Path,
    meta: Any,
    graph: Any,
    outputs: Collection[str],
    init: str,
    assets: Mapping[str, str],
) -> Iterator[Step]:
    """The steps that fill the variables that the `outputs` need. May add to the `graph`."""
    prefix = str(folder / "variables" / "variables")
    restore = meta.saver_def.restore_op_name
    needed = list(reached_at_the_top(meta.graph_def, outputs))
    restored = {node.name for node in reached_at_the_top(meta.graph_def, [restore])} if restore else set()
    filled = restored | set(_assigned(meta.graph_def, init))
    missing = [node for node in needed if node.op == _VARIABLE and node.name not in filled]
    # Copies of all the weights that nobody reads are not made.
    if restore and not (missing and restored.isdisjoint(node.name for node in needed)):
        yield Step(restore, {meta.saver_def.filename_tensor_name: prefix, **assets})
    if missing:
        yield _restoring_by_name(config, folder, graph, missing, prefix)


def _assigned(graph_def: Any, init: str) -> Iterator[str]:
    """The variables that the initial operation fills."""
    if init:
        for node in reached_at_the_top(graph_def, [init]):
            if node.op == "AssignVariableOp":
                yield node_name(node.input[0])


def _restoring_by_name(config: ModelConfig, folder: Path, graph: Any, nodes: Sequence[Any], prefix: str) -> Step:
    keys = _checkpoint_keys(config, folder, prefix)
    names = [node.attr["shared_name"].s.decode(errors="replace") for node in nodes]
    unknown = next((name for name in names if len(keys.get(name, ())) != 1), None)
    if unknown is not None:
        raise InvalidArgument(
            f"model '{config.name}': '{folder.name}' does not tell where the value of its variable '{unknown[:128]}' is. "
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
    """Where the checkpoint keeps the variables of each name."""
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
