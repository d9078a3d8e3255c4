# SPDX-License-Identifier: Apache-2.0
"""How a configuration sets TensorFlow up: its parameters and `optimization` become the settings of a session.

Called by `backends.tensorflow.backend` for each session, and by the readers of the two formats. The names are those of
Triton's backend, so that its configurations mean the same here, with one other default: an instance computes with one
thread, the one that calls it. Must not know what a model looks like.

    parameters
      TF_NUM_INTRA_THREADS      threads inside an operator, of each session; 1 unless told, 0 for all cores
      TF_NUM_INTER_THREADS      operators side by side, of each session; 1 unless told, 0 for all cores
      TF_USE_PER_SESSION_THREADS   taken and not needed: no two sessions share threads here
      MAX_SESSION_SHARE_COUNT   instances of one device that compute with the same session and weights; 1 unless told
      TF_GRAPH_TAG              of a SavedModel: which of its graphs, "serve" unless told; several tags by commas
      TF_SIGNATURE_DEF          of a SavedModel: which of its signatures, "serving_default" unless told
      TF_INIT_OPS_FILE          of a GraphDef: JSON {"init_ops": [names]}, run once before the first batch
      allow_file_operators      Headrace's own: 1 lets the model read and write the server's files as it computes
    optimization
      graph.level               -1 none, 0 TensorFlow's own, 1 XLA, 2 and over XLA with more
      execution_accelerators    gpu: auto_mixed_precision, gpu_io (taken and not needed)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.backends.contract import Placement
from headrace.backends.parameters import number_of
from headrace.backends.tensorflow.runtime import tf
from headrace.core.errors import FailedPrecondition, InvalidArgument, Unimplemented
from headrace.models.config.types import ModelConfig

_TRUE = ("1", "true", "on", "yes")
_FALSE = ("0", "false", "off", "no")


def session_config(config: ModelConfig, placement: Placement) -> Any:
    """What a session is made with."""
    made = tf.compat.v1.ConfigProto()
    # One thread an instance, where TensorFlow would take all cores: the instances, the other models and the event loop
    # share the cores already, so more threads would only take turns on them.
    made.intra_op_parallelism_threads = number_of(config.parameters, "TF_NUM_INTRA_THREADS", 1, 1024)
    inter = number_of(config.parameters, "TF_NUM_INTER_THREADS", 1, 1024)
    # Under 0 is the calling thread itself. A pool of one thread would hand each batch over and back, for 27 us.
    made.inter_op_parallelism_threads = -1 if inter == 1 else inter
    made.use_per_session_threads = inter > 1
    # Graphs carry the names of devices they were trained on.
    made.allow_soft_placement = True
    # TensorFlow would take all the memory of every GPU at once; this takes what is needed, and keeps it.
    made.gpu_options.allow_growth = True
    if placement.kind == "cpu":
        made.device_count["GPU"] = 0
        # Moves tensors out of a GPU's memory, and computes them again for gradients. Here it only takes time, at each load.
        rewriting = made.graph_options.rewrite_options
        rewriting.memory_optimization = rewriting.NO_MEM_OPT
    # Nothing is added to the graph after its first run, so a copy to add to is not kept.
    made.experimental.optimize_for_static_graph = True
    made.experimental.disable_output_partition_graphs = True
    _set_optimization(config, made, placement)
    return made


def device_name(config: ModelConfig, placement: Placement) -> str | None:
    """Where the operators of a graph go; None: where the graph says."""
    if placement.kind == "model":
        return None
    if placement.kind == "cpu":
        return "/device:CPU:0"
    if placement.device >= gpus():
        # TensorFlow would go on with the CPU; whoever asked for a GPU wants to know.
        raise FailedPrecondition(
            f"model '{config.name}' asks for GPU {placement.device}, and TensorFlow {tf.__version__} can use {gpus()} "
            "here: install tensorflow[and-cuda], check the driver, or say KIND_CPU in instance_group"
        )
    return f"/device:GPU:{placement.device}"


def gpus() -> int:
    """How many this TensorFlow can use. Takes none of their memory."""
    return len(tf.config.list_physical_devices("GPU"))


def share_count(config: ModelConfig) -> int:
    """How many instances may have one session."""
    return max(1, number_of(config.parameters, "MAX_SESSION_SHARE_COUNT", 1, 1_000_000))


def graph_tags(config: ModelConfig) -> frozenset[str]:
    """Of the graph to use of a SavedModel."""
    return frozenset(tag.strip() for tag in config.parameters.get("TF_GRAPH_TAG", "serve").split(","))


def signature_name(config: ModelConfig) -> str | None:
    """Of the signature to use of a SavedModel; None when the configuration does not say."""
    return config.parameters.get("TF_SIGNATURE_DEF")


def allows_files(config: ModelConfig) -> bool:
    """Whether the model may read and write files as it computes."""
    return _switch(config.parameters, "allow_file_operators")


def check(config: ModelConfig) -> None:
    """Refuse parameters that mean nothing, before the model is read."""
    session_config(config, Placement("check"))
    share_count(config)
    allows_files(config)


def _switch(parameters: Mapping[str, str], key: str) -> bool:
    text = parameters.get(key, "0")
    if text.lower() not in _TRUE + _FALSE:
        raise InvalidArgument(f"parameter {key} is '{text[:32]}': use 1 or 0")
    return text.lower() in _TRUE


def _set_optimization(config: ModelConfig, made: Any, placement: Placement) -> None:
    if config.proto is None:
        return
    level = int(config.proto.optimization.graph.level)
    options = made.graph_options.optimizer_options
    if level < 0:
        options.opt_level = options.L0
        made.graph_options.rewrite_options.disable_meta_optimizer = True
    elif level > 0:
        options.global_jit_level = options.ON_1 if level == 1 else options.ON_2
    accelerators = config.proto.optimization.execution_accelerators
    if placement.kind != "gpu":
        return
    for accelerator in accelerators.gpu_execution_accelerator:
        if accelerator.name == "auto_mixed_precision":
            rewriting = made.graph_options.rewrite_options
            rewriting.auto_mixed_precision = rewriting.ON
        elif accelerator.name == "tensorrt":
            raise Unimplemented(
                f"model '{config.name}' asks for tensorrt, which TensorFlow {tf.__version__} has no longer: take it out "
                "of optimization.execution_accelerators, or export the model to ONNX"
            )
        elif accelerator.name != "gpu_io":
            raise InvalidArgument(
                f"gpu_execution_accelerator '{accelerator.name[:64]}' is not known: use auto_mixed_precision"
            )
