# SPDX-License-Identifier: Apache-2.0
"""How a configuration sets ONNX Runtime up: its parameters and `optimization` become session options and providers.

Called by `backends.onnx.backend` for each instance. The names are those of Triton's backend, so that its configurations mean
the same here, with one other default: an instance computes with one thread. Must not know what a model looks like.

    parameters
      intra_op_thread_count   threads inside an operator; 1 unless told, 0 for all cores
      inter_op_thread_count   threads across operators, for execution_mode 1; 1 unless told, 0 for all cores
      execution_mode          0 one operator after the other, 1 side by side
      enable_mem_arena        1 keep freed memory for the next batch, 0 give it back
      enable_mem_pattern      1 plan the memory of a batch in one piece, 0 do not
      memory.enable_memory_arena_shrinkage   devices whose kept memory is given back after each batch: "cpu:0;gpu:0"
      session.*               handed to ONNX Runtime as it is
      graph_optimization_level   the same as optimization.graph.level
      optimized_model_cache   1 keep the optimised graph in the version's folder and open that the next time (Headrace's own,
                              see `graph_cache`); 0, unless told, optimise at each load
      gpu_mem_limit, cudnn_conv_algo_search, arena_extend_strategy, do_copy_in_default_stream   of the CUDA provider
    optimization
      graph.level             -1 basic, 0 all, 1 extended, 2 none
      execution_accelerators  gpu: tensorrt, cuda; cpu: openvino, dnnl, xnnpack
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnxruntime as ort

from headrace.backends.contract import Placement
from headrace.backends.parameters import number_of
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig

Providers = list[tuple[str, dict[str, str]]]

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"

_CPU_ACCELERATORS = {
    "openvino": "OpenVINOExecutionProvider",
    "dnnl": "DnnlExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
}
_CACHE = "optimized_model_cache"
_FLAGS = {"1": True, "true": True, "0": False, "false": False}
_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_SPINNING = ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning")
_CUDA_CHOICES = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
}
_CUDA_PLAIN = ("gpu_mem_limit", "do_copy_in_default_stream")
_TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_TENSORRT_PRECISIONS = {"FP32": None, "FP16": "trt_fp16_enable", "INT8": "trt_int8_enable"}


def session_options(config: ModelConfig) -> ort.SessionOptions:
    """What the session of each instance is made with."""
    parameters = config.parameters
    options = ort.SessionOptions()
    options.logid = config.name
    # One thread an instance, where ONNX Runtime would take all cores: the instances, the other models and the event
    # loop share the cores already, so more threads would only take turns on them. A model that is alone on its machine
    # and slow for one request is the one to give more.
    options.intra_op_num_threads = number_of(parameters, "intra_op_thread_count", 1, 1024)
    options.inter_op_num_threads = number_of(parameters, "inter_op_thread_count", 1, 1024)
    if number_of(parameters, "execution_mode", 0, 1):
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = bool(number_of(parameters, "enable_mem_arena", 1, 1))
    options.enable_mem_pattern = bool(number_of(parameters, "enable_mem_pattern", 1, 1))
    options.graph_optimization_level = _graph_level(config)
    # A thread that spins while it waits for work takes a core from whoever has work.
    for key in _SPINNING:
        options.add_session_config_entry(key, "0")
    for key, value in parameters.items():
        if key.startswith("session."):
            options.add_session_config_entry(key, value)
    return options


def keeps_graph(config: ModelConfig) -> bool:
    """Whether the optimised graph is to be kept beside the model."""
    text = config.parameters.get(_CACHE, "0").lower()
    if text not in _FLAGS:
        raise InvalidArgument(f"parameter {_CACHE} is '{text[:32]}': use 0 or 1")
    return _FLAGS[text]


def graph_settings(config: ModelConfig, chosen: Providers) -> dict[str, Any]:
    """All that decides what graph ONNX Runtime makes of a model."""
    return {
        "onnxruntime": ort.__version__,
        "level": str(_graph_level(config)),
        "mode": config.parameters.get("execution_mode", "0"),
        "session": {key: value for key, value in config.parameters.items() if key.startswith("session.")},
        "providers": chosen,
    }


def run_options(config: ModelConfig) -> ort.RunOptions:
    """What each batch is computed with."""
    options = ort.RunOptions()
    # What fails is raised, and logged by who catches it; ONNX Runtime would print it too, past the log and in colour.
    options.log_severity_level = 4
    devices = config.parameters.get(_SHRINKAGE)
    if devices:
        options.add_run_config_entry(_SHRINKAGE, devices)
    return options


def can_use_gpus() -> bool:
    """Whether this build of ONNX Runtime has a provider for GPUs."""
    return CUDA in ort.get_available_providers()


def providers(config: ModelConfig, placement: Placement) -> Providers:
    """What computes the operators, the preferred one first. Refuses what this ONNX Runtime was not built with."""
    chosen: Providers = []
    if placement.kind == "gpu":
        device = {"device_id": str(placement.device)}
        cuda = _cuda_parameters(config.parameters)
        for name, options in _accelerators(config, "gpu"):
            if name == "tensorrt":
                chosen.append((TENSORRT, _tensorrt_options(options) | device))
            elif name == "cuda":
                cuda |= options
            else:
                raise InvalidArgument(f"gpu_execution_accelerator '{name[:64]}' is not known: use tensorrt or cuda")
        chosen.append((CUDA, cuda | device))
    else:
        for name, options in _accelerators(config, "cpu"):
            if name not in _CPU_ACCELERATORS:
                raise InvalidArgument(
                    f"cpu_execution_accelerator '{name[:64]}' is not known: use one of {', '.join(_CPU_ACCELERATORS)}"
                )
            chosen.append((_CPU_ACCELERATORS[name], options))
    chosen.append((CPU, {}))
    available = ort.get_available_providers()
    for name, _ in chosen:
        if name not in available:
            raise FailedPrecondition(
                f"model '{config.name}' needs {name}, which this ONNX Runtime does not have (it has "
                f"{', '.join(available)}): {_remedy(placement)}"
            )
    return chosen


def _remedy(placement: Placement) -> str:
    if placement.kind == "gpu":
        return "install onnxruntime-gpu in place of onnxruntime, or say KIND_CPU in instance_group"
    return "install an onnxruntime built with it, or take it out of optimization.execution_accelerators"


def _graph_level(config: ModelConfig) -> ort.GraphOptimizationLevel:
    levels = {
        "-1": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        "0": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
        "1": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        "2": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    }
    text = config.parameters.get("graph_optimization_level")
    if text is None:
        text = "0" if config.proto is None else str(config.proto.optimization.graph.level)
    if text not in levels:
        raise InvalidArgument(
            f"optimization.graph.level is {text[:32]}: use -1 (basic), 0 (all), 1 (extended), 2 (none)"
        )
    return levels[text]


def _accelerators(config: ModelConfig, kind: str) -> list[tuple[str, dict[str, str]]]:
    if config.proto is None:
        return []
    accelerators: Any = config.proto.optimization.execution_accelerators
    return [(each.name, dict(each.parameters)) for each in getattr(accelerators, f"{kind}_execution_accelerator")]


def _cuda_parameters(parameters: Mapping[str, str]) -> dict[str, str]:
    """The CUDA provider's options where Triton's older configurations have them."""
    options = {key: parameters[key] for key in _CUDA_PLAIN if key in parameters}
    for key, words in _CUDA_CHOICES.items():
        if key in parameters:
            if parameters[key] not in words:
                raise InvalidArgument(f"parameter {key} is '{parameters[key][:32]}': use one of {', '.join(words)}")
            options[key] = words[parameters[key]]
    return options


def _tensorrt_options(given: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in given.items():
        if key == "precision_mode":
            if value not in _TENSORRT_PRECISIONS:
                raise InvalidArgument(f"precision_mode is '{value[:32]}': use FP32, FP16 or INT8")
            switch = _TENSORRT_PRECISIONS[value]
            if switch is not None:
                options[switch] = "1"
        elif key.startswith("trt_") or key in _TENSORRT_NAMES:
            options[_TENSORRT_NAMES.get(key, key)] = value
        else:
            raise InvalidArgument(f"tensorrt has no parameter '{key[:64]}': see ONNX Runtime's TensorRT provider")
    return options
