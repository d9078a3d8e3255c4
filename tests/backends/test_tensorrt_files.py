# SPDX-License-Identifier: Apache-2.0
"""Which plan a GPU gets, plans that cannot be read, GPUs that are not there. On the fake TensorRT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_tensorrt.plans import batched
from tensorrt_setup import (
    DRIVER,
    FAKE_TENSORRT,
    GPU,
    NO_SERVICES,
    TensorRTBackend,
    configured,
    device,
    fresh_driver,  # noqa: F401
    needs_fake_cuda,
    open_instance,
    placed,
)

from headrace.backends.contract import Placement
from headrace.backends.tensorrt.backend import Settings, plan_file, settings_of
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig

IDENTITY = batched("identity", ["X"], ["Y"], [4])
NAMED = {"8.6": "ampere.plan", "9.0": "hopper.plan"}


def test_the_capability_chooses_the_file(tmp_path: Path) -> None:
    files = placed(tmp_path, b"a", b"h", b"d", names=("ampere.plan", "hopper.plan", "model.plan"))
    config = configured(cc_model_filenames=NAMED)
    assert [plan_file(config, files, capability).name for capability in ("8.6", "9.0", "7.5", "12.0")] == [
        "ampere.plan",
        "hopper.plan",
        "model.plan",
        "model.plan",
    ]
    (files.version_folder / "other.plan").write_bytes(b"o")
    other = configured(cc_model_filenames=NAMED, default_model_filename="other.plan")
    assert plan_file(other, files, "7.5").name == "other.plan"


def test_a_gpu_without_a_plan_is_reported(tmp_path: Path) -> None:
    files = placed(tmp_path, b"a", names=("ampere.plan",))
    config = configured(cc_model_filenames=NAMED)
    with pytest.raises(
        FailedPrecondition,
        match=r"no plan for this GPU, whose compute capability is 7\.5: cc_model_filenames has plans for 8\.6, 9\.0, and "
        r"there is no 'model\.plan' for the rest\. Build a plan with trtexec",
    ):
        plan_file(config, files, "7.5")
    with pytest.raises(FailedPrecondition, match=r"has no file 'test/1/hopper\.plan'.*cc_model_filenames\[9\.0\]"):
        plan_file(config, files, "9.0")
    with pytest.raises(FailedPrecondition, match=r"version 1 has no file 'test/1/model\.plan'"):
        plan_file(configured(), files, "8.6")
    with pytest.raises(InvalidArgument, match="name a file inside it"):
        plan_file(configured(cc_model_filenames={"8.6": "../secret"}), files, "8.6")


@needs_fake_cuda
def test_each_gpu_reads_the_plan_for_itself(tmp_path: Path) -> None:
    DRIVER.capabilities = ["8.6", "9.0", "7.5"]
    plans = [batched("identity", ["X"], ["Y"], [4], capability=capability) for capability in ("8.6", "9.0")]
    files = placed(tmp_path, *plans, names=("ampere.plan", "hopper.plan"))
    model = TensorRTBackend().load(configured(cc_model_filenames=NAMED), files, NO_SERVICES)
    for gpu in (0, 1):
        instance = model.open(Placement(f"test_0_gpu{gpu}", "gpu", gpu))
        assert instance.compute({"X": np.ones((1, 4), np.float32)}, ["Y"])["Y"].shape == (1, 4)
    with pytest.raises(FailedPrecondition, match=r"compute capability is 7\.5"):
        model.open(Placement("test_0_gpu2", "gpu", 2))
    swapped = configured(cc_model_filenames={"8.6": "hopper.plan"})
    with pytest.raises(FailedPrecondition, match="built for another GPU or TensorRT version, or is damaged"):
        open_instance(swapped, files)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\x08\x07\x12\x07pytorch",
        IDENTITY[:-9],
        batched("identity", ["X"], ["Y"], [4], tensorrt="10.2.0"),
        batched("identity", ["X"], ["Y"], [4], capability="5.0"),
    ],
    ids=["empty", "text", "onnx", "cut", "older", "other-gpu"],
)
def test_an_unreadable_plan_says_to_build_it_again(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    files = placed(tmp_path, content)
    wanted = "another GPU or TensorRT version, or is damaged: build it again with trtexec on this machine"
    with pytest.raises(FailedPrecondition, match=wanted) as caught:
        open_instance(configured(), files)
    assert "deserializeCudaEngine" in caplog.text
    assert "deserializeCudaEngine" not in str(caught.value)
    with pytest.raises(FailedPrecondition, match=wanted):
        TensorRTBackend().complete(configured({}, {}, 0), files)


def test_a_folder_instead_of_the_plan_is_reported(tmp_path: Path) -> None:
    files = placed(tmp_path, None)
    (files.version_folder / "model.plan").mkdir()
    with pytest.raises(FailedPrecondition, match=r"'model\.plan' cannot be read. It must be a file"):
        open_instance(configured(), files)


def test_a_plan_with_its_own_runtime_must_be_allowed(tmp_path: Path) -> None:
    content = batched("identity", ["X"], ["Y"], [4], tensorrt="10.2.0", version_compatible=True)
    files = placed(tmp_path, content)
    with pytest.raises(FailedPrecondition, match="another GPU or TensorRT version"):
        open_instance(configured(), files)
    open_instance(configured(parameters={"version_compatible": "1"}), files)


def test_parameters() -> None:
    def read(**parameters: str) -> Settings:
        return settings_of(ModelConfig("test", "tensorrt", parameters=parameters))

    assert read(somebody_elses="x") == Settings("STATIC", version_compatible=False)
    assert read(version_compatible="True", execution_context_allocation_strategy="ON_PROFILE_CHANGE") == Settings(
        "ON_PROFILE_CHANGE", version_compatible=True
    )
    with pytest.raises(InvalidArgument, match="'DYNAMIC': use one of STATIC, ON_PROFILE_CHANGE"):
        read(execution_context_allocation_strategy="DYNAMIC")
    with pytest.raises(InvalidArgument, match="version_compatible is 'maybe': use true or false"):
        read(version_compatible="maybe")


def test_the_strategy_reaches_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    make = FAKE_TENSORRT.ICudaEngine.create_execution_context
    monkeypatch.setattr(
        FAKE_TENSORRT.ICudaEngine,
        "create_execution_context",
        lambda self, strategy: (seen.append(strategy), make(self, strategy))[1],
    )
    parameters = {"execution_context_allocation_strategy": "ON_PROFILE_CHANGE"}
    open_instance(configured(parameters=parameters), placed(tmp_path, IDENTITY))
    assert seen == [FAKE_TENSORRT.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE]


def test_only_a_gpu_computes_plans(tmp_path: Path) -> None:
    model = TensorRTBackend().load(configured(), placed(tmp_path, IDENTITY), NO_SERVICES)
    for kind in ("cpu", "model"):
        with pytest.raises(InvalidArgument, match="only a GPU can compute.*say KIND_GPU"):
            model.open(Placement(f"test_0_{kind}", kind))


@needs_fake_cuda
def test_gpus_that_cuda_does_not_see(tmp_path: Path) -> None:
    assert TensorRTBackend().usable_gpus(4) == 1
    assert TensorRTBackend().usable_gpus(0) == 0
    with pytest.raises(FailedPrecondition, match="plan for GPU 3, and CUDA sees 1 GPUs here: check the driver"):
        open_instance(configured(), placed(tmp_path, IDENTITY), Placement("test_0_gpu3", "gpu", 3))
    DRIVER.capabilities = []
    assert TensorRTBackend().usable_gpus(4) == 0
    with pytest.raises(FailedPrecondition, match="CUDA sees 0 GPUs here"):
        TensorRTBackend().complete(configured({}, {}, 0), placed(tmp_path, IDENTITY))


def test_a_tensorrt_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAKE_TENSORRT, "__version__", "8.6.1")
    with pytest.raises(FailedPrecondition, match=r"TensorRT 8\.6\.1 is too old for this server: install TensorRT 10"):
        open_instance(configured(), placed(tmp_path, IDENTITY), GPU)


@needs_fake_cuda
def test_a_missing_driver_means_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(device.cuda, "cudaGetDeviceCount", missing)
    assert device.count_gpus() == 0
