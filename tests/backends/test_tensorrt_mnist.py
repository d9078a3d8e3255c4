# SPDX-License-Identifier: Apache-2.0
"""The first server's example `trt_mnist`, as its guide has it, served by the engine on the fake TensorRT."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_tensorrt.plans import gives, plan, profile, takes
from tensorrt_setup import (
    DRIVER,
    FAKE_TENSORRT,
    device,
    fresh_driver,  # noqa: F401
)

from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.engine.repository.states import State
from support.engines import ask

# Word for word: the user guide of TensorRT Inference Server, chapter 6.2.
CONFIG = """name: "trt_mnist"
platform: "tensorrt_plan"
max_batch_size: 8
input [
  {
    name: "data"
    data_type: TYPE_FP32
    format: FORMAT_NCHW
    dims: [ 1, 28, 28 ]
  }
]
output [
  {
    name: "prob"
    data_type: TYPE_FP32
    dims: [ 10, 1, 1 ]
    label_filename: "mnist_labels.txt"
  }
]
cc_model_filenames [
  {
    key: "6.1"
    value: "model6_1.plan"
  },
  {
    key: "7.0"
    value: "model7_0.plan"
  }
]
instance_group [
  {
    count: 2
    gpus: [ 0 ]
  }
]
"""


def mnist(capability: str, most: int = 8) -> bytes:
    ranges = {"data": ([1, 1, 28, 28], [most, 1, 28, 28], [most, 1, 28, 28])}
    tensors = [takes("data", [-1, 1, 28, 28]), gives("prob", [-1, 10, 1, 1])]
    return plan("mnist", tensors, [profile(ranges)], capability=capability)


def repository(folder: Path, config: str = CONFIG, most: int = 8) -> Path:
    version = folder / "trt_mnist" / "1"
    version.mkdir(parents=True)
    (folder / "trt_mnist" / "config.pbtxt").write_text(config)
    (folder / "trt_mnist" / "mnist_labels.txt").write_text("\n".join(f"digit {digit}" for digit in range(10)))
    here = device.capability(0)
    for name, capability in (("model6_1.plan", "6.1"), ("model7_0.plan", "7.0"), ("model.plan", here)):
        (version / name).write_bytes(mnist(capability, most))
    return folder


def served(folder: Path, work: Callable[[Engine], Awaitable[None]]) -> None:
    async def run() -> None:
        settings = EngineSettings(repositories=(folder,), repository=RepositorySettings(mode="explicit"), gpus=1)
        engine = open_engine(settings)
        await engine.start()
        try:
            await work(engine)
        finally:
            await engine.close(10)

    asyncio.run(run())


def expected(data: Any) -> Any:
    scores = data.reshape(len(data), 784) @ FAKE_TENSORRT.networks.MNIST_WEIGHTS
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (powers / powers.sum(axis=1, keepdims=True)).reshape(-1, 10, 1, 1)


@pytest.mark.parametrize("capability", ["6.1", "7.0"] if DRIVER is not None else ["here"])
def test_the_example_is_served_on_either_gpu(tmp_path: Path, capability: str) -> None:
    if DRIVER is not None:
        DRIVER.capabilities = [capability]
    digits = np.random.default_rng(1).random((5, 1, 28, 28), np.float32)

    async def work(engine: Engine) -> None:
        await engine.plane.load("trt_mnist")
        metadata = engine.plane.metadata("trt_mnist")
        assert [
            (tensor.name, tensor.datatype, list(tensor.shape)) for tensor in (*metadata.inputs, *metadata.outputs)
        ] == [
            ("data", "FP32", [-1, 1, 28, 28]),
            ("prob", "FP32", [-1, 10, 1, 1]),
        ]
        for rows in (1, 5):
            answer = await ask(engine.plane, "trt_mnist", data=digits[:rows])
            np.testing.assert_allclose(answer.outputs[0].array, expected(digits[:rows]), rtol=1e-6)
        (version,) = engine.plane.statistics("trt_mnist")
        assert version.labels["prob"] == [f"digit {digit}" for digit in range(10)]
        if DRIVER is not None:
            assert len(DRIVER.streams) == 2
            assert DRIVER.used(0) >= FAKE_TENSORRT.WEIGHT_BYTES + 2 * FAKE_TENSORRT.CONTEXT_BYTES
        await engine.plane.unload("trt_mnist")

    served(repository(tmp_path), work)
    if DRIVER is not None:
        assert (DRIVER.blocks, DRIVER.streams) == ({}, {})


@pytest.mark.parametrize(
    ("was", "becomes", "reason"),
    [
        ("dims: [ 1, 28, 28 ]", "dims: [ 28, 28, 1 ]", "input 'data' of model 'trt_mnist' has shape [-1, 28, 28, 1]"),
        ("dims: [ 10, 1, 1 ]", "dims: [ 11, 1, 1 ]", "output 'prob' of model 'trt_mnist' has shape [-1, 11, 1, 1]"),
        ('name: "data"', 'name: "image"', "unexpected inference input 'image', allowed inputs are: data"),
        ("max_batch_size: 8", "max_batch_size: 9", "built for batches of at most 8"),
        ("TYPE_FP32", "TYPE_FP16", "is FP16 in the configuration and FP32 in the model"),
        ("    gpus: [ 0 ]", "    kind: KIND_CPU", "only a GPU can compute"),
    ],
)
def test_a_configuration_that_does_not_fit_the_plan_is_not_served(
    tmp_path: Path, was: str, becomes: str, reason: str
) -> None:
    async def work(engine: Engine) -> None:
        with pytest.raises(Exception, match="trt_mnist"):
            await engine.plane.load("trt_mnist")
        assert engine.control is not None
        result = engine.control.state_of("trt_mnist", 1) or engine.control.state_of("trt_mnist", None)
        assert result is not None
        assert result.state is State.UNAVAILABLE
        assert reason in result.reason

    served(repository(tmp_path, CONFIG.replace(was, becomes, 1)), work)


def test_without_a_configuration_the_plan_determines_it(tmp_path: Path) -> None:
    folder = repository(tmp_path, most=48)
    (folder / "trt_mnist" / "config.pbtxt").unlink()

    async def work(engine: Engine) -> None:
        await engine.plane.load("trt_mnist")
        config = engine.plane.config("trt_mnist")
        assert (config.backend, config.max_batch_size) == ("tensorrt", 48)
        assert (config.inputs[0].dims, config.outputs[0].dims) == ((1, 28, 28), (10, 1, 1))
        assert [(group.kind, group.gpus) for group in config.instance_groups] == [("gpu", (0,))]
        digits = np.random.default_rng(2).random((48, 1, 28, 28), np.float32)
        answer = await ask(engine.plane, "trt_mnist", data=digits)
        np.testing.assert_allclose(answer.outputs[0].array, expected(digits), rtol=1e-6)

    served(folder, work)
