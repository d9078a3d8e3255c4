# SPDX-License-Identifier: Apache-2.0
"""Headrace's TensorRT backend on the fake TensorRT, and models for it. Importing this installs the fake.

With HEADRACE_TEST_REAL_CUDA set, on a machine with a GPU and cuda-python, the memory, the streams and the copies are real
and only TensorRT is a fake; what needs a GPU that misbehaves is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from fake_tensorrt import REAL_CUDA, install

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.core.dtypes import FP32, DType
from headrace.models.config.messages import new_config
from headrace.models.config.types import Dims, InputSpec, ModelConfig, OutputSpec

IS_REAL = bool(os.environ.get(REAL_CUDA))
FAKE_TENSORRT = install(fake_cuda=not IS_REAL)

from headrace.backends.tensorrt import device  # noqa: E402
from headrace.backends.tensorrt.backend import TensorRTBackend  # noqa: E402
from headrace.backends.tensorrt.instance import TensorRTInstance  # noqa: E402

needs_fake_cuda = pytest.mark.skipif(IS_REAL, reason="needs a GPU that can be broken, or counted")
GPU = Placement("test_0_gpu0", "gpu", 0)
NO_SERVICES = cast("EngineServices", None)
DRIVER: Any = None if IS_REAL else device.cuda.FAKE


@pytest.fixture(autouse=True)
def fresh_driver() -> Iterator[None]:
    """Each test has GPUs that nothing is on, and leaves them so."""
    if DRIVER is None:
        yield
        return
    DRIVER.reset()
    DRIVER.threads.gpu = 0
    yield


def placed(folder: Path, *plans: bytes | None, names: tuple[str, ...] = ("model.plan",)) -> ModelFiles:
    """Plans as files of version 1 of `test`."""
    files = ModelFiles(folder / "test", 1, folder / "test" / "1")
    files.version_folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(names, plans, strict=False):
        if content is not None:
            (files.version_folder / name).write_bytes(content)
    return files


Tensors = Mapping[str, tuple[DType | None, Dims | None]]


def configured(
    inputs: Tensors | None = None, outputs: Tensors | None = None, max_batch_size: int = 8, **more: Any
) -> ModelConfig:
    """A configuration for `batched("identity", ["X"], ["Y"], [4])`; any part can be replaced."""
    inputs = {"X": (FP32, (4,))} if inputs is None else inputs
    outputs = {"Y": (FP32, (4,))} if outputs is None else outputs
    more.setdefault("proto", new_config(name="test"))
    return ModelConfig(
        "test",
        "tensorrt",
        max_batch_size=max_batch_size,
        inputs=more.pop("input_specs", tuple(InputSpec(name, dtype, dims) for name, (dtype, dims) in inputs.items())),
        outputs=more.pop("output_specs", tuple(OutputSpec(name, *spec) for name, spec in outputs.items())),
        **more,
    )


def open_instance(config: ModelConfig, files: ModelFiles, placement: Placement = GPU) -> TensorRTInstance:
    """Load and open."""
    return TensorRTBackend().load(config, files, NO_SERVICES).open(placement)
