# SPDX-License-Identifier: Apache-2.0
"""A TensorFlow graph with named inputs and outputs: both readers produce one, and a session runs it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.backends.signature import Port, Signature
from headrace.backends.tensorflow.runtime import tf
from headrace.core.dtypes import BY_FRAMEWORK_NAME
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec, SequenceBatching

log = logging.getLogger("headrace.backends")


@dataclass(frozen=True, slots=True)
class Step:
    """An operation to run once, before the first batch."""

    operation: str
    feed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Function:
    """A graph with named inputs and outputs."""

    filename: str
    """The model's file name, for messages."""
    graph: Any
    """A `tf.Graph`."""
    signature: Signature
    feeds: Mapping[str, str]
    """The tensor of each input."""
    fetches: Mapping[str, str]
    """The tensor of each output."""
    setup: tuple[Step, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of inputs that a request omits, as TensorProto."""


def import_graph(
    config: ModelConfig, filename: str, graph_def: Any, device: str | None, *, known_operators: Any = None
) -> Any:
    """Import a GraphDef into a `tf.Graph`, with its operators on the `device`."""
    if device is not None:
        # A file names the devices of the machine that trained it.
        for node in graph_def.node:
            node.device = ""
        for function in graph_def.library.function:
            for node in function.node_def:
                node.device = ""
    graph = tf.Graph()
    try:
        with graph.as_default(), tf.device(device):
            tf.graph_util.import_graph_def(graph_def, name="", producer_op_list=known_operators)
    except Exception:
        # ValueError, NotFoundError, TypeError and others, depending on the graph.
        log.exception("model %s: its graph could not be imported", config.name)
        raise InvalidArgument(
            f"model '{config.name}': TensorFlow {tf.__version__} cannot use the graph of '{filename}'. It is "
            "damaged, has operators of another library, or needs a newer TensorFlow; the server's log says which. Export "
            "the model again"
        ) from None
    return graph


def free_graph(graph: Any) -> None:
    """Free a graph at once. It is a reference cycle, and the garbage collector skips objects that the server froze."""
    try:
        from tensorflow.python.framework.ops import dismantle_graph

        dismantle_graph(graph)
    except (ImportError, AttributeError):
        # Not part of the public API.
        gc.collect()


def port_of(name: str, dtype: Any, shape: Any) -> Port:
    """Return a port from TensorFlow's type and shape."""
    kind = str(dtype.base_dtype.name)
    # A scalar has no dimensions to compare either.
    sizes = None if shape.rank is None else tuple(-1 if size is None else size for size in shape.as_list())
    return Port(name, kind, BY_FRAMEWORK_NAME.get(kind), sizes or None)


def declared_inputs(config: ModelConfig) -> Iterator[str]:
    """Yield every input in the configuration, including those that requests do not carry."""
    yield from (spec.name for spec in config.inputs)
    if isinstance(config.scheduling, SequenceBatching):
        yield from (control.name for control in config.scheduling.controls)
        yield from (state.input_name for state in config.scheduling.states)
    for batch in config.batch_inputs:
        yield from batch.target_names


def declared_outputs(config: ModelConfig) -> Iterator[str]:
    """Yield every output in the configuration."""
    yield from (spec.name for spec in config.outputs)
    if isinstance(config.scheduling, SequenceBatching):
        yield from (state.output_name for state in config.scheduling.states)


def check_shapes_known(config: ModelConfig, shapes: Mapping[str, Any]) -> None:
    """Reject auto-completion for tensors of unknown rank: their dims must be in the configuration."""
    specs: tuple[InputSpec | OutputSpec, ...] = (*config.inputs, *config.outputs)
    written = {spec.name for spec in specs if spec.dims}
    for name, shape in shapes.items():
        if shape.rank is None and name not in written:
            raise InvalidArgument(
                f"model '{config.name}' does not declare the shape of '{name}': write it with its dims in the configuration"
            )
