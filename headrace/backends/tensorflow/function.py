# SPDX-License-Identifier: Apache-2.0
"""A graph with names for what goes in and comes out: what the readers of both formats make, and what a session computes.

Called by `graphdef` and `savedmodel`. Knows TensorFlow's graphs, and no files, sessions or requests.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.backends.signature import Port, Signature
from headrace.backends.tensorflow.runtime import tf
from headrace.core.dtypes import (
    BF16,
    BOOL,
    BYTES,
    FP16,
    FP32,
    FP64,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
)
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec, SequenceBatching

log = logging.getLogger("headrace.backends")

_DTYPES = {
    "bool": BOOL,
    "uint8": UINT8,
    "uint16": UINT16,
    "uint32": UINT32,
    "uint64": UINT64,
    "int8": INT8,
    "int16": INT16,
    "int32": INT32,
    "int64": INT64,
    "float16": FP16,
    "float32": FP32,
    "float64": FP64,
    "bfloat16": BF16,
    "string": BYTES,
}


@dataclass(frozen=True, slots=True)
class Step:
    """Something to run once, before the first batch."""

    operation: str
    feed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Function:
    """One of them."""

    filename: str
    """Of the model, for people."""
    graph: Any
    """A `tf.Graph`."""
    signature: Signature
    feeds: Mapping[str, str]
    """The tensor for each input."""
    fetches: Mapping[str, str]
    """The tensor for each output."""
    setup: tuple[Step, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What inputs are that a request leaves out, as TensorProto."""


def imported(
    config: ModelConfig, filename: str, graph_def: Any, device: str | None, *, known_operators: Any = None
) -> Any:
    """A `tf.Graph` of a GraphDef, with its operators on the `device`."""
    if device is not None:
        # Devices that the file names are those of the machine it was trained on.
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
        # ValueError, NotFoundError, TypeError and others, by what is wrong with the graph.
        log.exception("model %s: its graph could not be imported", config.name)
        raise InvalidArgument(
            f"model '{config.name}': TensorFlow {tf.__version__} cannot use the graph of '{filename}'. It is "
            "damaged, has operators of another library, or needs a newer TensorFlow; the server's log says which. Export "
            "the model again"
        ) from None
    return graph


def dismantle(graph: Any) -> None:
    """Let a graph go at once. It refers to itself, and what the server froze for the collector is never collected."""
    try:
        from tensorflow.python.framework.ops import dismantle_graph

        dismantle_graph(graph)
    except (ImportError, AttributeError):
        # It is not of the public interface.
        gc.collect()


def port_of(name: str, dtype: Any, shape: Any) -> Port:
    """From TensorFlow's words for type and shape."""
    kind = str(dtype.base_dtype.name)
    # A single number has no sizes to compare either.
    sizes = None if shape.rank is None else tuple(-1 if size is None else size for size in shape.as_list())
    return Port(name, kind, _DTYPES.get(kind), sizes or None)


def declared_inputs(config: ModelConfig) -> Iterator[str]:
    """Every input that the configuration knows, those that requests do not carry among them."""
    yield from (spec.name for spec in config.inputs)
    if isinstance(config.scheduling, SequenceBatching):
        yield from (control.name for control in config.scheduling.controls)
        yield from (state.input_name for state in config.scheduling.states)
    for batch in config.batch_inputs:
        yield from batch.target_names


def declared_outputs(config: ModelConfig) -> Iterator[str]:
    """Every output that the configuration knows."""
    yield from (spec.name for spec in config.outputs)
    if isinstance(config.scheduling, SequenceBatching):
        yield from (state.output_name for state in config.scheduling.states)


def check_told(config: ModelConfig, shapes: Mapping[str, Any]) -> None:
    """Refuse to complete a configuration for tensors of any rank: only a person knows what they mean."""
    specs: tuple[InputSpec | OutputSpec, ...] = (*config.inputs, *config.outputs)
    written = {spec.name for spec in specs if spec.dims}
    for name, shape in shapes.items():
        if shape.rank is None and name not in written:
            raise InvalidArgument(
                f"model '{config.name}' does not tell the shape of '{name}': write it with its dims in the configuration"
            )
