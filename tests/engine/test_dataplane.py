# SPDX-License-Identifier: Apache-2.0
"""The data plane: names, versions, and what a model lets in."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from headrace.core.dtypes import FP32
from headrace.core.errors import InvalidArgument, NotFound
from headrace.core.messages import InferRequest, InferResponse, RequestedOutput
from headrace.core.tensors import Tensor
from headrace.engine.builtin import BuiltinModel
from headrace.engine.dataplane import DataPlane


def ask(plane: DataPlane, *arrays: Any, model: str = "identity", names: str = "INPUT0", **more: Any) -> InferResponse:
    inputs = [Tensor.of(name, array) for name, array in zip(names.split(), arrays, strict=True)]

    async def main() -> Any:
        future = asyncio.get_running_loop().create_future()
        plane.submit(InferRequest(model, inputs, **more), future.set_result)
        return await asyncio.wait_for(future, 10)

    result = asyncio.run(main())
    assert isinstance(result, InferResponse)
    return result


ROW = np.zeros((1, 2), np.int32)
IMAGE = np.zeros((1, 3, 224, 224), np.float32)


def test_models_are_known_by_name_and_version() -> None:
    plane = DataPlane()
    assert plane.model_names() == ["first1000", "identity"]
    assert plane.has_model("identity")
    assert plane.has_model("identity", "1")
    assert not plane.has_model("identity", "2")
    assert not plane.has_model("nope")


def test_an_answer_names_its_model_version_and_request() -> None:
    for version in ("", "1"):
        response = ask(DataPlane(), ROW, model_version=version, id="seven")
        assert (response.model_name, response.model_version, response.id) == ("identity", "1", "seven")
        assert [output.name for output in response.outputs] == ["OUTPUT0"]


def test_first1000_gives_the_first_thousand_of_each_image() -> None:
    images = np.arange(2 * 3 * 224 * 224, dtype=np.float32).reshape(2, 3, 224, 224)
    (output,) = ask(DataPlane(), images, model="first1000").outputs
    assert np.array_equal(output.array, images.reshape(2, -1)[:, :1000])


@pytest.mark.parametrize(
    ("kept", "changes", "text"),
    [
        (NotFound, {"model": "nope"}, "^Request for unknown model: 'nope' is not found$"),
        (NotFound, {"model_version": "2"}, "^Request for unknown model: 'identity' version 2 is not found$"),
        (InvalidArgument, {"model": ".."}, "not allowed"),
        (InvalidArgument, {"names": "X"}, "unexpected inference input 'X' for model 'identity'"),
        (InvalidArgument, {"outputs": [RequestedOutput("Y")]}, "unexpected inference output 'Y' for model 'identity'"),
    ],
)
def test_what_is_refused(kept: type[Exception], changes: dict[str, Any], text: str) -> None:
    with pytest.raises(kept, match=text):
        ask(DataPlane(), ROW, **changes)


@pytest.mark.parametrize(
    ("model", "array", "text"),
    [
        ("identity", np.zeros((), np.int32), "batch dimension"),
        ("identity", np.zeros((0, 2), np.int32), "batch dimension"),
        ("identity", np.zeros((65, 2), np.int32), r"^inference request batch-size must be <= 64 for 'identity'$"),
        ("first1000", np.zeros((1, 16), np.float32), r"Expected \[-1,3,224,224\], got \[1,16\]\.$"),
        ("first1000", IMAGE.astype(np.float64), "data-type is 'FP64', but model 'first1000' expects 'FP32'"),
    ],
)
def test_arrays_that_are_refused(model: str, array: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        ask(DataPlane(), array, model=model)


@pytest.mark.parametrize(
    ("names", "given", "missing"),
    [("A B", "['A','B']", "['INPUT0']"), ("INPUT0 B", "['INPUT0','B']", "[]"), ("", "[]", "['INPUT0']")],
)
def test_the_wrong_number_of_inputs_is_told_in_known_words(names: str, given: str, missing: str) -> None:
    count = len(names.split())
    with pytest.raises(InvalidArgument) as refusal:
        ask(DataPlane(), *[ROW] * count, names=names)
    assert refusal.value.message == (
        f"expected 1 inputs but got {count} inputs for model 'identity'. Got input(s) {given}, "
        f"but missing required input(s) {missing}. Please provide all required input(s)."
    )


def test_a_thousand_long_names_are_not_all_repeated() -> None:
    with pytest.raises(InvalidArgument) as refusal:
        ask(DataPlane(), *[ROW] * 1000, names=" ".join(["x" * 1000] * 1000))
    assert len(refusal.value.message) < 2000


def test_the_largest_batch_is_let_in() -> None:
    assert ask(DataPlane(), np.zeros((64, 1))).outputs[0].shape == (64, 1)


def test_a_plane_has_the_models_it_is_given() -> None:
    plane = DataPlane([BuiltinModel("double", lambda rows: rows * 2, FP32, (2,), max_rows=4)])
    assert plane.model_names() == ["double"]
    (output,) = ask(plane, np.array([[1, 2]], np.float32), model="double").outputs
    assert output.array.tolist() == [[2, 4]]
    with pytest.raises(InvalidArgument, match="<= 4"):
        ask(plane, np.zeros((5, 2), np.float32), model="double")
