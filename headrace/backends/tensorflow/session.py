# SPDX-License-Identifier: Apache-2.0
"""TensorFlow sessions: options from the configuration, one-time initialisation, and running batches."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from headrace.backends.contract import Array, Placement
from headrace.backends.model_config import parse_int
from headrace.backends.signature import Port
from headrace.backends.tensorflow.function import Function, free_graph
from headrace.backends.tensorflow.runtime import CallableOptions, tf
from headrace.core.dtypes import BF16, BYTES
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument, Unimplemented
from headrace.models.config.types import ModelConfig

_TRUE = ("1", "true", "on", "yes")
_FALSE = ("0", "false", "off", "no")


def session_config(config: ModelConfig, placement: Placement) -> Any:
    """Return the ConfigProto of a session."""
    session_proto = tf.compat.v1.ConfigProto()
    # One thread per instance, where TensorFlow would take all cores: the instances, the other models and the event loop
    # already share the cores, so more threads would only compete.
    session_proto.intra_op_parallelism_threads = parse_int(config.parameters, "TF_NUM_INTRA_THREADS", 1, 1024)
    inter = parse_int(config.parameters, "TF_NUM_INTER_THREADS", 1, 1024)
    # Below 0 means the calling thread. A pool of one thread would pass each batch there and back, for 27 us.
    session_proto.inter_op_parallelism_threads = -1 if inter == 1 else inter
    session_proto.use_per_session_threads = inter > 1
    # Graphs contain device names of the machine that trained them.
    session_proto.allow_soft_placement = True
    # By default TensorFlow takes all memory of every GPU; with this it grows as needed, and keeps what it has.
    session_proto.gpu_options.allow_growth = True
    if placement.kind == "cpu":
        session_proto.device_count["GPU"] = 0
        # Swaps tensors out of GPU memory and recomputes them for gradients. Without gradients it only slows down each load.
        rewrites = session_proto.graph_options.rewrite_options
        rewrites.memory_optimization = rewrites.NO_MEM_OPT
    # The graph does not grow after its first run, so TensorFlow need not keep a copy.
    session_proto.experimental.optimize_for_static_graph = True
    session_proto.experimental.disable_output_partition_graphs = True
    _set_optimization(config, session_proto, placement)
    return session_proto


def device_name(config: ModelConfig, placement: Placement) -> str | None:
    """Return the device for a graph's operators; None: the devices in the graph."""
    if placement.kind == "model":
        return None
    if placement.kind == "cpu":
        return "/device:CPU:0"
    if placement.device >= gpus():
        # TensorFlow silently falls back to the CPU; a configuration that asks for a GPU must fail instead.
        raise FailedPrecondition(
            f"model '{config.name}' asks for GPU {placement.device}, and TensorFlow {tf.__version__} can use {gpus()} "
            "here: install tensorflow[and-cuda], check the driver, or say KIND_CPU in instance_group"
        )
    return f"/device:GPU:{placement.device}"


def gpus() -> int:
    """Return the number of GPUs that this TensorFlow can use, without allocating their memory."""
    return len(tf.config.list_physical_devices("GPU"))


def share_count(config: ModelConfig) -> int:
    """Return how many instances may share a session."""
    return max(1, parse_int(config.parameters, "MAX_SESSION_SHARE_COUNT", 1, 1_000_000))


def graph_tags(config: ModelConfig) -> frozenset[str]:
    """Return the tags of the SavedModel graph to use."""
    return frozenset(tag.strip() for tag in config.parameters.get("TF_GRAPH_TAG", "serve").split(","))


def signature_name(config: ModelConfig) -> str | None:
    """Return the name of the SavedModel signature to use; None if the configuration has none."""
    return config.parameters.get("TF_SIGNATURE_DEF")


def allows_files(config: ModelConfig) -> bool:
    """Return whether the model may read and write files when it runs."""
    return _switch(config.parameters, "allow_file_operators")


def check(config: ModelConfig) -> None:
    """Reject invalid parameters before the model is read."""
    session_config(config, Placement("check"))
    share_count(config)
    allows_files(config)


def _switch(parameters: Mapping[str, str], key: str) -> bool:
    text = parameters.get(key, "0")
    if text.lower() not in _TRUE + _FALSE:
        raise InvalidArgument(f"parameter {key} is '{text[:32]}': use 1 or 0")
    return text.lower() in _TRUE


def _set_optimization(config: ModelConfig, session_proto: Any, placement: Placement) -> None:
    if config.proto is None:
        return
    level = int(config.proto.optimization.graph.level)
    options = session_proto.graph_options.optimizer_options
    if level < 0:
        options.opt_level = options.L0
        session_proto.graph_options.rewrite_options.disable_meta_optimizer = True
    elif level > 0:
        options.global_jit_level = options.ON_1 if level == 1 else options.ON_2
    accelerators = config.proto.optimization.execution_accelerators
    if placement.kind != "gpu":
        return
    for accelerator in accelerators.gpu_execution_accelerator:
        if accelerator.name == "auto_mixed_precision":
            rewrites = session_proto.graph_options.rewrite_options
            rewrites.auto_mixed_precision = rewrites.ON
        elif accelerator.name == "tensorrt":
            raise Unimplemented(
                f"model '{config.name}' asks for tensorrt, which TensorFlow {tf.__version__} has no longer: take it out "
                "of optimization.execution_accelerators, or export the model to ONNX"
            )
        elif accelerator.name != "gpu_io":
            raise InvalidArgument(
                f"gpu_execution_accelerator '{accelerator.name[:64]}' is not known: use auto_mixed_precision"
            )


log = logging.getLogger("headrace.backends")

_BFLOAT16 = tf.bfloat16.as_numpy_dtype


class Session:
    """One session with its weights. Several threads may use it at a time."""

    def __init__(self, name: str, function: Function, inputs: list[str], outputs: list[str], settings: Any) -> None:
        self._name = name
        ports = {**function.signature.inputs, **function.signature.optional}
        self._inputs: list[tuple[str, Port, bool]] = [(key, ports[key], ports[key].dtype is BF16) for key in inputs]
        given = function.signature.outputs
        # Every run computes all configured outputs: each other selection would copy the constants again.
        self._outputs = [(key, given[key].dtype is BF16, given[key].dtype is BYTES) for key in outputs]
        self._session: Any = None
        self._call: Any = None
        self._graph = function.graph
        try:
            self._session = tf.compat.v1.Session(graph=function.graph, config=settings)
            for step in function.setup:
                self._session.run(step.operation, dict(step.feed))
            self._defaults = self._default_values(function)
            self._call = _callable(
                self._session, [function.feeds[key] for key in inputs], [function.fetches[key] for key in outputs]
            )
        except Exception:
            log.exception("model %s: TensorFlow could not initialise it", name)
            self.close()
            raise InvalidArgument(
                f"model '{name}': TensorFlow {tf.__version__} could not initialise '{function.filename}'. It is "
                "damaged, its parts do not belong together, or memory ran out; the server's log says which. Export the "
                "model again"
            ) from None
        _trim()

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> dict[str, Array]:
        """Run a batch."""
        feed = []
        for name, port, is_bf16 in self._inputs:
            array = inputs.get(name)
            if array is None:
                feed.append(self._default(name))
            elif not port.takes(array.shape):
                # TensorFlow does not check the shapes it is fed, only what operators make of them.
                raise self._input_error(inputs)
            else:
                feed.append(array.view(_BFLOAT16) if is_bf16 else array)
        try:
            results = self._call(*feed)
        except Exception as error:
            log.exception("model %s could not compute a batch", self._name)
            raise self._client_error(error, inputs) from None
        outputs: dict[str, Array] = {}
        for (name, is_bf16, is_text), result in zip(self._outputs, results, strict=True):
            if is_text:
                # A scalar string is not an array.
                outputs[name] = result if isinstance(result, np.ndarray) else np.array(result, dtype=object)
                continue
            array = np.asarray(result)
            # An output that the graph passes through is in the client's memory, which may change after the response.
            for given in feed:
                if np.may_share_memory(array, given):
                    array = array.copy()
            # A constant is returned without a copy: writing to it would change the model.
            array.flags.writeable = False
            outputs[name] = array.view(np.uint16) if is_bf16 else array
        return outputs

    def close(self) -> None:
        """Free the weights, the graph and the working memory. TensorFlow keeps GPU memory."""
        self._call = None
        session, self._session = self._session, None
        if session is not None:
            session.close()
            del session
        graph, self._graph = self._graph, None
        if graph is not None:
            free_graph(graph)
            del graph
        _trim()

    def _default_values(self, function: Function) -> dict[str, Array]:
        """Return the values of inputs that may be omitted."""
        values = {name: tf.make_ndarray(value) for name, value in function.defaults.items()}
        for name, _, _ in self._inputs:
            if name in function.signature.optional and name not in values:
                tensor = function.graph.get_tensor_by_name(function.feeds[name])
                if tensor.op.type == "PlaceholderWithDefault":
                    values[name] = np.asarray(self._session.run(tensor))
        return values

    def _default(self, name: str) -> Array:
        value = self._defaults.get(name)
        if value is None:
            raise InvalidArgument(f"model '{self._name}' needs the input '{name}': send it with the others")
        return value

    def _client_error(self, error: Exception, inputs: Mapping[str, Array]) -> HeadraceError:
        """Return the error for the client. TensorFlow's text reveals the model's internals and goes to the log only."""
        if isinstance(error, tf.errors.InvalidArgumentError | tf.errors.OutOfRangeError):
            return self._input_error(inputs)
        return Internal(f"model '{self._name}' failed to compute this request; the server's log has the details")

    def _input_error(self, inputs: Mapping[str, Array]) -> InvalidArgument:
        shapes = ", ".join(f"'{name}' {list(array.shape)}" for name, array in inputs.items())
        return InvalidArgument(
            f"model '{self._name}' does not accept these inputs, by their shapes or values: {shapes}. Compare them with "
            "the model's metadata; the server's log may say where it stopped"
        )


def _callable(session: Any, feeds: list[str], fetches: list[str]) -> Any:
    """Return a function from arrays to arrays, in these orders."""
    make = getattr(session, "_make_callable_from_options", None)
    if make is None:
        # Not public API, so it may disappear; the public way takes 250 us more.
        return session.make_callable(fetches, feeds)
    return make(CallableOptions(feed=feeds, fetch=fetches))


def _trim() -> None:
    """Return freed memory to the system: a load of ResNet-50 frees 800 MB that the C library would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
