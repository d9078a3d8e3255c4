# SPDX-License-Identifier: Apache-2.0
"""What a configuration says to ONNX Runtime."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
import pytest
from onnx_graphs import configured

from headrace.backends.contract import Placement
from headrace.backends.onnx import session as onnx_settings
from headrace.backends.onnx.backend import OnnxBackend
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.messages import new_config
from headrace.models.config.types import ModelConfig

GPU = Placement("test_0_gpu1", "gpu", 1)


def with_parameters(**parameters: str) -> ModelConfig:
    return configured(parameters=parameters)


def with_accelerator(side: str, name: str, **parameters: str) -> ModelConfig:
    proto = new_config(name="test")
    accelerators = getattr(proto.optimization.execution_accelerators, f"{side}_execution_accelerator")
    accelerators.add(name=name, parameters=parameters)
    return configured(proto=proto)


def entry(options: Any, key: str) -> str:
    return str(options.get_session_config_entry(key))


def test_an_instance_computes_with_one_thread_that_does_not_spin() -> None:
    options = onnx_settings.session_options(configured())
    assert options.intra_op_num_threads == 1
    assert options.inter_op_num_threads == 1
    assert options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
    assert options.enable_cpu_mem_arena
    assert options.enable_mem_pattern
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert entry(options, "session.intra_op.allow_spinning") == "0"
    assert entry(options, "session.inter_op.allow_spinning") == "0"
    assert onnx_settings.run_options(configured()).log_severity_level == 4


def test_parameters_have_tritons_names() -> None:
    given = {
        "intra_op_thread_count": "3",
        "inter_op_thread_count": "2",
        "execution_mode": "1",
        "enable_mem_arena": "0",
        "enable_mem_pattern": "0",
        "session.intra_op.allow_spinning": "1",
        "session.use_device_allocator_for_initializers": "1",
        "memory.enable_memory_arena_shrinkage": "cpu:0",
        "somebody_elses": "x",
    }
    config = configured(parameters=given)
    options = onnx_settings.session_options(config)
    assert options.intra_op_num_threads == 3
    assert options.inter_op_num_threads == 2
    assert options.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert not options.enable_cpu_mem_arena
    assert not options.enable_mem_pattern
    assert entry(options, "session.intra_op.allow_spinning") == "1"
    assert entry(options, "session.use_device_allocator_for_initializers") == "1"
    run = onnx_settings.run_options(config)
    assert run.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "cpu:0"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("intra_op_thread_count", "many"),
        ("inter_op_thread_count", "-1"),
        ("intra_op_thread_count", "99999999999"),
        ("execution_mode", "2"),
        ("enable_mem_arena", "true"),
        ("intra_op_thread_count", "²"),
    ],
)
def test_a_parameter_that_is_not_a_number_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=f"parameter {key} is '{value}': use a whole number from 0 to"):
        onnx_settings.session_options(with_parameters(**{key: value}))


@pytest.mark.parametrize(
    ("level", "meaning"),
    [(-1, "ORT_ENABLE_BASIC"), (0, "ORT_ENABLE_ALL"), (1, "ORT_ENABLE_EXTENDED"), (2, "ORT_DISABLE_ALL")],
)
def test_the_level_of_optimisation(level: int, meaning: str) -> None:
    proto = new_config(name="test")
    proto.optimization.graph.level = level
    expected = getattr(ort.GraphOptimizationLevel, meaning)
    assert onnx_settings.session_options(configured(proto=proto)).graph_optimization_level == expected
    by_parameter = with_parameters(graph_optimization_level=str(level))
    assert onnx_settings.session_options(by_parameter).graph_optimization_level == expected


def test_an_unknown_level_is_refused() -> None:
    proto = new_config(name="test")
    proto.optimization.graph.level = 7
    with pytest.raises(InvalidArgument, match=r"optimization\.graph\.level is 7: use -1"):
        onnx_settings.session_options(configured(proto=proto))


def test_providers_on_the_cpu() -> None:
    for kind in ("cpu", "model"):
        chosen = onnx_settings.providers(configured(), Placement("x", kind))  # type: ignore[arg-type]
        assert chosen == [("CPUExecutionProvider", {})]


@pytest.fixture
def every_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ONNX Runtime had been built with all of them."""
    monkeypatch.setattr(ort, "get_available_providers", ort.get_all_providers)


@pytest.mark.usefixtures("every_provider")
def test_providers_on_a_gpu() -> None:
    assert onnx_settings.providers(configured(), GPU) == [
        ("CUDAExecutionProvider", {"device_id": "1"}),
        ("CPUExecutionProvider", {}),
    ]
    old = with_parameters(gpu_mem_limit="1000", cudnn_conv_algo_search="1", arena_extend_strategy="1")
    assert onnx_settings.providers(old, GPU)[0][1] == {
        "gpu_mem_limit": "1000",
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "device_id": "1",
    }
    with pytest.raises(InvalidArgument, match="parameter cudnn_conv_algo_search is '9': use one of 0, 1, 2"):
        onnx_settings.providers(with_parameters(cudnn_conv_algo_search="9"), GPU)


@pytest.mark.usefixtures("every_provider")
def test_accelerators() -> None:
    config = with_accelerator(
        "gpu", "tensorrt", precision_mode="FP16", max_workspace_size_bytes="64", trt_engine_cache_enable="1"
    )
    assert onnx_settings.providers(config, GPU)[:2] == [
        (
            "TensorrtExecutionProvider",
            {
                "trt_fp16_enable": "1",
                "trt_max_workspace_size": "64",
                "trt_engine_cache_enable": "1",
                "device_id": "1",
            },
        ),
        ("CUDAExecutionProvider", {"device_id": "1"}),
    ]
    # What is said of GPUs does not hold for an instance on the CPU.
    assert onnx_settings.providers(config, Placement("x")) == [("CPUExecutionProvider", {})]
    cuda = with_accelerator("gpu", "cuda", cudnn_conv_use_max_workspace="0")
    assert onnx_settings.providers(cuda, GPU)[0][1] == {"cudnn_conv_use_max_workspace": "0", "device_id": "1"}
    openvino = with_accelerator("cpu", "openvino", device_type="CPU")
    assert onnx_settings.providers(openvino, Placement("x"))[0] == (
        "OpenVINOExecutionProvider",
        {"device_type": "CPU"},
    )


@pytest.mark.usefixtures("every_provider")
@pytest.mark.parametrize(
    ("config", "placement", "text"),
    [
        (with_accelerator("gpu", "warp"), GPU, "gpu_execution_accelerator 'warp' is not known: use tensorrt or cuda"),
        (with_accelerator("cpu", "warp"), Placement("x"), "cpu_execution_accelerator 'warp' is not known: use one of"),
        (with_accelerator("gpu", "tensorrt", precision_mode="FP8"), GPU, "precision_mode is 'FP8'"),
        (with_accelerator("gpu", "tensorrt", speed="11"), GPU, "tensorrt has no parameter 'speed'"),
    ],
)
def test_what_is_not_known_is_refused(config: ModelConfig, placement: Placement, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        onnx_settings.providers(config, placement)


def test_a_provider_that_was_not_built_in_is_refused_with_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(
        FailedPrecondition, match=r"needs CUDA.*\(it has CPUExecutionProvider\): install onnxruntime-gpu"
    ):
        onnx_settings.providers(configured(), GPU)
    with pytest.raises(FailedPrecondition, match="needs OpenVINO.*take it out of"):
        onnx_settings.providers(with_accelerator("cpu", "openvino"), Placement("x"))


@pytest.mark.parametrize(("available", "usable"), [(["CPUExecutionProvider"], 0), (["CUDAExecutionProvider"], 2)])
def test_gpus_are_used_only_by_a_build_that_can(
    monkeypatch: pytest.MonkeyPatch, available: list[str], usable: int
) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: available)
    assert OnnxBackend().usable_gpus(2) == usable
