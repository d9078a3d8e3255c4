# SPDX-License-Identifier: Apache-2.0
"""The identity backend: inputs are outputs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.identity import IdentityBackend, IdentityInstance
from headrace.core.dtypes import BYTES, FP32, INT32, DType
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec

FILES = ModelFiles(Path("/nowhere"), 1, Path("/nowhere/1"))


def open_instance(*dtypes: DType, max_batch_size: int = 8, **parameters: Any) -> IdentityInstance:
    config = ModelConfig(
        "same",
        "identity",
        max_batch_size=max_batch_size,
        inputs=tuple(InputSpec(f"IN{index}", dtype, (-1,)) for index, dtype in enumerate(dtypes)),
        outputs=tuple(OutputSpec(f"OUT{index}", dtype, (-1,)) for index, dtype in enumerate(dtypes)),
        parameters={key: str(value) for key, value in parameters.items()},
    )
    backend = IdentityBackend()
    assert backend.complete(config, FILES) is None
    return backend.load(config, FILES, cast("EngineServices", None)).open(Placement("same_0_cpu"))


def test_outputs_are_the_inputs_in_order_and_not_copied() -> None:
    instance = open_instance(FP32, BYTES)
    numbers, words = np.ones((2, 3), np.float32), np.array([[b"a"], [b"b"]], dtype=object)
    answer = instance.compute({"IN1": words, "IN0": numbers}, ["OUT0", "OUT1"])
    assert answer["OUT0"] is numbers
    assert answer["OUT1"] is words
    assert list(instance.compute({"IN1": words, "IN0": numbers}, ["OUT1"])) == ["OUT1"]
    assert list(instance.compute({"IN0": numbers}, ["OUT0"])) == ["OUT0"]
    with pytest.raises(InvalidArgument, match="output 'OUT1' gives back input 'IN1', which this request left out"):
        instance.compute({"IN0": numbers}, ["OUT0", "OUT1"])
    instance.close()


def test_first_gives_the_first_numbers_of_each_row() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    cut = open_instance(FP32, first=5).compute({"IN0": rows}, ["OUT0"])["OUT0"]
    assert cut.tolist() == [[0, 1, 2, 3, 4], [12, 13, 14, 15, 16]]
    whole = open_instance(FP32, first=5, max_batch_size=0).compute({"IN0": rows}, ["OUT0"])["OUT0"]
    assert whole.tolist() == [0, 1, 2, 3, 4]
    assert open_instance(FP32, first=5).compute({"IN0": rows[:0]}, ["OUT0"])["OUT0"].shape == (0, 5)
    assert open_instance(FP32, first=99).compute({"IN0": rows}, ["OUT0"])["OUT0"].shape == (2, 12)


def test_it_can_wait_and_it_can_work(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"IN0": np.zeros((1, 1), np.float32)}
    waited: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", waited.append)
        open_instance(FP32, sleep_milliseconds=30).compute(row, ["OUT0"])
    assert waited == [0.03]
    worked = time.thread_time()
    open_instance(FP32, busy_milliseconds=20.5).compute(row, ["OUT0"])
    assert time.thread_time() - worked >= 0.0205


@pytest.mark.parametrize("value", ["-1", "soon", "nan", "1e99", ""])
def test_a_parameter_that_is_not_a_time_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgument, match=f"parameter sleep_milliseconds of model 'same' is '{value}': use 0 to"):
        open_instance(FP32, sleep_milliseconds=value)


def test_every_output_needs_its_input() -> None:
    backend, services = IdentityBackend(), cast("EngineServices", None)
    one = (InputSpec("IN", FP32, (-1,)),)
    for config in (
        ModelConfig("same", "identity", inputs=one),
        ModelConfig("same", "identity"),
        ModelConfig("same", "identity", inputs=one * 2, outputs=(OutputSpec("OUT", FP32, (-1,)),)),
    ):
        with pytest.raises(InvalidArgument, match="declare as many outputs as inputs"):
            backend.load(config, FILES, services)
    other = ModelConfig("same", "identity", inputs=one, outputs=(OutputSpec("OUT", INT32, (-1,)),))
    with pytest.raises(InvalidArgument, match="output 'OUT' of model 'same' must have the data type of input 'IN'"):
        backend.load(other, FILES, services)
