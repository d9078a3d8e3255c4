# SPDX-License-Identifier: Apache-2.0
"""Open ONNX Runtime sessions with the options and providers of a model's configuration."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidProtobuf

from headrace.backends.contract import Placement
from headrace.backends.model_config import parse_bool, parse_choice, parse_int
from headrace.backends.onnx.graph_cache import first_line
from headrace.backends.onnx.model_file import Outline, read_outline
from headrace.backends.signature import Port, Signature
from headrace.core.dtypes import BY_FRAMEWORK_NAME
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
    """Return the options of an instance's session."""
    parameters = config.parameters
    options = ort.SessionOptions()
    options.logid = config.name
    # One thread per instance, where ONNX Runtime would take all cores: the instances, the other models and the event
    # loop already share the cores, so more threads would only compete. Raise it for a slow model that has the machine
    # for itself.
    options.intra_op_num_threads = parse_int(parameters, "intra_op_thread_count", 1, 1024)
    options.inter_op_num_threads = parse_int(parameters, "inter_op_thread_count", 1, 1024)
    if parse_int(parameters, "execution_mode", 0, 1):
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = bool(parse_int(parameters, "enable_mem_arena", 1, 1))
    options.enable_mem_pattern = bool(parse_int(parameters, "enable_mem_pattern", 1, 1))
    options.graph_optimization_level = _graph_level(config)
    # Spinning threads would take a core from threads that have work.
    for key in _SPINNING:
        options.add_session_config_entry(key, "0")
    for key, value in parameters.items():
        if key.startswith("session."):
            options.add_session_config_entry(key, value)
    return options


def caches_graph(config: ModelConfig) -> bool:
    """Return whether to cache the optimised graph next to the model."""
    return parse_bool(config.parameters, "optimized_model_cache", False)


def graph_settings(config: ModelConfig, chosen: Providers) -> dict[str, Any]:
    """Return all settings that affect how ONNX Runtime optimises a model."""
    return {
        "onnxruntime": ort.__version__,
        "level": str(_graph_level(config)),
        "mode": config.parameters.get("execution_mode", "0"),
        "session": {key: value for key, value in config.parameters.items() if key.startswith("session.")},
        "providers": chosen,
    }


def run_options(config: ModelConfig) -> ort.RunOptions:
    """Return the options of each run."""
    options = ort.RunOptions()
    # Errors are raised and logged by the caller; ONNX Runtime would also print them, in colour and not to the log.
    options.log_severity_level = 4
    devices = config.parameters.get(_SHRINKAGE)
    if devices:
        options.add_run_config_entry(_SHRINKAGE, devices)
    return options


def can_use_gpus() -> bool:
    """Return whether this build of ONNX Runtime has a provider for GPUs."""
    return CUDA in ort.get_available_providers()


def providers(config: ModelConfig, placement: Placement) -> Providers:
    """Return the execution providers in order of preference. Reject those that this ONNX Runtime lacks."""
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
    return [
        (accelerator.name, dict(accelerator.parameters))
        for accelerator in getattr(accelerators, f"{kind}_execution_accelerator")
    ]


def _cuda_parameters(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the CUDA provider's options from the parameters of Triton's older configurations."""
    options = {key: parameters[key] for key in _CUDA_PLAIN if key in parameters}
    for key, choices in _CUDA_CHOICES.items():
        choice = parse_choice(parameters, key, None, choices)
        if choice is not None:
            options[key] = choices[choice]
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


log = logging.getLogger("headrace.backends")

_FATAL = 4  # ONNX Runtime's severity levels: print nothing below this one.

_CPP_NAMES = {"float32": "float", "float64": "double"}
_DTYPES = {f"tensor({_CPP_NAMES.get(name, name)})": dtype for name, dtype in BY_FRAMEWORK_NAME.items()}


def open_session(
    config: ModelConfig,
    file: Path,
    options: Any,
    chosen: list[tuple[str, dict[str, str]]],
    content: bytes | None = None,
) -> Any:
    """Open a session that uses the first of the `chosen` providers that supports an operator.

    With `content`, that is the model, and `file` only gives its name.
    """
    try:
        return new_session(str(file) if content is None else content, options, chosen)
    except Exception as error:
        # Each of ONNX Runtime's exceptions is a class of its own under Exception.
        first = chosen[0][0]
        log.warning("model %s: %s could not be opened with %s: %s", config.name, file, first, first_line(error))
        log.debug("model %s: traceback of the error", config.name, exc_info=error)
        if first != CPU:
            raise FailedPrecondition(
                f"model '{config.name}': ONNX Runtime {ort.__version__} cannot open '{file.name}' with {first}. The "
                "device is out of memory or does not work, or the file is damaged; the server's log says which"
            ) from None
        if content is not None:
            raise InvalidArgument(
                f"model '{config.name}': ONNX Runtime {ort.__version__} cannot compute what '{file.name}' says: its "
                "operators, weights and inputs do not fit together. Compare the types and dims of the configuration with "
                "the model; the server's log says where it stopped"
            ) from None
        shown = "/".join(file.parts[-3:])
        if isinstance(error, InvalidProtobuf) or read_outline(file) is None:
            raise InvalidArgument(
                f"model '{config.name}': {shown} is not a valid ONNX file: it is damaged or incomplete, or it has another "
                "format. Copy or export it again"
            ) from None
        raise InvalidArgument(
            f"model '{config.name}': ONNX Runtime {ort.__version__} cannot read {shown}. It is damaged, or needs a newer "
            "ONNX Runtime; the server's log says which. Export it again, or replace it"
        ) from None


def new_session(source: str | bytes, options: Any, chosen: list[tuple[str, dict[str, str]]]) -> Any:
    """Open a session from a file or its content; raise ONNX Runtime's exceptions."""
    # Fallback is off: it would print, run elsewhere from then on, and report nothing.
    return ort.InferenceSession(
        source,
        options,
        providers=[name for name, _ in chosen],
        provider_options=[given for _, given in chosen],
        enable_fallback=False,
    )


def read_signature(config: ModelConfig, file: Path, outline: Outline | None) -> Signature:
    """Return a model's inputs and outputs from a session that never runs; its outline without weights, if that is enough."""
    options = ort.SessionOptions()
    options.logid = config.name
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")
    # ONNX Runtime warns of unused weights, which do not matter here; the real session warns again.
    options.log_severity_level = _FATAL
    if outline is not None and outline.is_complete:
        try:
            outline_signature = signature_of(new_session(outline.model, options, [(CPU, {})]))
        except Exception as error:  # Some operators need their weights, or the model is invalid: open the whole file.
            log.debug("model %s: cannot open its outline without weights: %s", config.name, first_line(error))
        else:
            inputs = {name: port for name, port in outline_signature.inputs.items() if name not in outline.weights}
            given = {name: port for name, port in outline_signature.inputs.items() if name in outline.optional}
            return Signature(inputs, outline_signature.outputs, {**outline_signature.optional, **given})
    return signature_of(open_session(config, file, options, [(CPU, {})]))


def check_inputs(config: ModelConfig, signature: Signature) -> None:
    """Reject a model with inputs that no request can carry: complex numbers, types of 8 bits or fewer, and lists."""
    for port in signature.inputs.values():
        if port.dtype is None and port.kind.startswith("tensor("):
            raise InvalidArgument(
                f"input '{port.name}' of model '{config.name}' has elements of type {port.kind[7:-1]}, which requests "
                "cannot carry: export the model with a Cast from FP16, FP32 or INT8 in front of it"
            )


def signature_of(session: Any) -> Signature:
    """Read the signature from an `InferenceSession`."""
    return Signature(
        _ports(session.get_inputs()), _ports(session.get_outputs()), _ports(session.get_overridable_initializers())
    )


def _ports(arguments: Iterable[Any]) -> dict[str, Port]:
    ports = {}
    for argument in arguments:
        # A dimension is a number, the name of a symbolic one, or None.
        sizes = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in argument.shape or ())
        ports[argument.name] = Port(argument.name, argument.type, _DTYPES.get(argument.type), sizes or None)
    return ports
