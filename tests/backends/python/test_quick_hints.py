# SPDX-License-Identifier: Apache-2.0
"""Type hints of a `predict` function as inputs and outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, TypedDict

import numpy as np
import numpy.typing as npt
import pytest

from headrace.backends.python.child.errors import TritonModelException
from headrace.backends.python.child.type_hints import Hint, read_signature
from headrace.backends.python.child.values import Output, WrongInput, to_argument, to_array, to_outputs
from headrace.core.dtypes import BOOL, BYTES, FP16, FP32, FP64, INT64, DType


def hinted(annotation: Any) -> Hint:
    def predict(x): ...

    predict.__annotations__ = {"x": annotation}
    return read_signature(predict, bound=False).inputs["x"]


def returning(annotation: Any) -> dict[str, tuple[DType | None, Any]]:
    def predict(x): ...

    predict.__annotations__ = {"return": annotation}
    outputs = read_signature(predict, bound=False).outputs
    return {name: (hint.dtype, hint.dims) for name, hint in outputs.items()}


class Typed(TypedDict):
    label: str
    scores: NotRequired[Annotated[npt.NDArray[np.float32], (10,)]]


class Named(NamedTuple):
    label: bytes
    score: float


@dataclass
class Data:
    sure: bool


@pytest.mark.parametrize(
    ("annotation", "dtype", "dims", "form"),
    [
        (np.ndarray, None, None, "array"),
        (Any, None, None, "array"),
        (npt.NDArray[Any], None, None, "array"),
        (npt.NDArray[np.floating[Any]], None, None, "array"),
        (npt.NDArray[np.float16], FP16, None, "array"),
        (npt.NDArray[np.object_], BYTES, None, "array"),
        (npt.NDArray[np.bool_], BOOL, None, "array"),
        (Annotated[npt.NDArray[np.float32], (-1, 16)], FP32, (-1, 16), "array"),
        (Annotated[np.ndarray, "a note for others", [3]], None, (3,), "array"),
        (np.ndarray[tuple[int, Literal[3]], np.dtype[np.int64]], INT64, (-1, 3), "array"),
        (float, FP64, (1,), "value"),
        (int, INT64, (1,), "value"),
        (bool, BOOL, (1,), "value"),
        (str, BYTES, (1,), "value"),
        (np.float32, FP32, (1,), "value"),
        (list[float], FP64, (-1,), "list"),
        (list[list[str]], BYTES, (-1, -1), "list"),
        (Annotated[list[int], (8,)], INT64, (8,), "list"),
    ],
)
def test_an_input(annotation: Any, dtype: DType | None, dims: Any, form: str) -> None:
    hint = hinted(annotation)
    assert (hint.dtype, hint.dims, hint.form, hint.optional) == (dtype, dims, form, False)


def test_inputs_that_may_be_left_out() -> None:
    def predict(a: int | None, b: Optional[str], c: float = 2.0): ...  # noqa: UP045  # people write it

    inputs = read_signature(predict, bound=False).inputs
    assert [(hint.optional, hint.has_default) for hint in inputs.values()] == [
        (True, False),
        (True, False),
        (True, True),
    ]


@pytest.mark.parametrize(
    ("annotation", "outputs"),
    [
        (np.ndarray, {"output": (None, None)}),
        (str, {"output": (BYTES, (1,))}),
        (tuple[float, str], {"output_0": (FP64, (1,)), "output_1": (BYTES, (1,))}),
        (Typed, {"label": (BYTES, (1,)), "scores": (FP32, (10,))}),
        (Named, {"label": (BYTES, (1,)), "score": (FP64, (1,))}),
        (Data, {"sure": (BOOL, (1,))}),
        (dict, {}),
        (dict[str, np.ndarray], {}),
    ],
)
def test_outputs(annotation: Any, outputs: Any) -> None:
    assert returning(annotation) == outputs


def test_streams_and_coroutines() -> None:
    def generator(x: int) -> Iterable[str]:
        yield ""

    def iterator(x: int) -> Iterator[str]:
        return iter([""])

    async def agenerator(x: int) -> AsyncIterator[str]:
        yield ""

    async def coroutine(x: int) -> str:
        return ""

    def plain(x: int) -> str:
        return ""

    functions: list[Callable[..., Any]] = [generator, iterator, agenerator, coroutine, plain]
    results = [read_signature(function, bound=False) for function in functions]
    assert [(result.streams, result.awaits) for result in results] == [
        (True, False),
        (True, False),
        (True, True),
        (False, True),
        (False, False),
    ]
    assert all(result.outputs["output"].dtype is BYTES for result in results)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (dict, "which no tensor can be: write np.ndarray"),
        (complex, "the type hint of argument 'x' of predict is complex"),
        (int | str, "which no tensor can be"),
        (list[np.ndarray], "which no tensor can be"),
        (npt.NDArray[np.complex64], "which no tensor has: use one of"),
        (Annotated[np.ndarray, (0, 3)], "use whole numbers above 0, or -1"),
        (Annotated[float, (3,)], "is one value and has no shape"),
    ],
)
def test_hints_that_mean_no_tensor(annotation: Any, text: str) -> None:
    with pytest.raises(TritonModelException, match=text):
        hinted(annotation)


def test_signatures_that_cannot_be_read() -> None:
    def many(*x: float): ...

    def none(): ...

    def unknown(x: Missing): ...  # type: ignore[name-defined]  # noqa: F821

    for function, text in ((many, "name each input"), (none, "takes no arguments"), (unknown, "cannot be read: name")):
        with pytest.raises(TritonModelException, match=text):
            read_signature(function, bound=False)
    with pytest.raises(TritonModelException, match="of no certain length"):
        returning(tuple[int, ...])


def test_values_of_requests() -> None:
    texts = np.array([b"a", "\u00e9".encode()], dtype=object)
    assert to_argument("x", texts, hinted(list[str])) == ["a", "\u00e9"]
    assert to_argument("x", texts, hinted(npt.NDArray[np.str_])).tolist() == ["a", "\u00e9"]
    assert to_argument("x", texts, hinted(npt.NDArray[np.object_])).tolist() == texts.tolist()
    assert type(to_argument("x", np.array([2]), hinted(int))) is int
    assert type(to_argument("x", np.array([2], np.float32), hinted(np.float32))) is np.float32
    assert to_argument("x", np.array([[1, 2]]), hinted(list[list[int]])) == [[1, 2]]
    with pytest.raises(WrongInput, match="not UTF-8"):
        to_argument("x", np.array([b"\xff"], dtype=object), hinted(str))
    with pytest.raises(WrongInput, match=r"send shape \[1\]"):
        to_argument("x", np.array([1, 2]), hinted(int))


@pytest.mark.parametrize(
    ("value", "dtype", "dims", "array"),
    [
        (1.5, FP32, (1,), np.array([1.5], np.float32)),
        (np.arange(3), FP32, (-1,), np.arange(3, dtype=np.float32)),
        ([[1, 2]], INT64, (-1, 2), np.array([[1, 2]])),
        ("text", BYTES, (1,), np.array([b"text"], dtype=object)),
        ([b"a\0", "b"], BYTES, (-1,), np.array([b"a\0", b"b"], dtype=object)),
        (np.array(["a", "b"]), BYTES, (2,), np.array([b"a", b"b"], dtype=object)),
        (np.ones((2, 2)), None, (), np.ones((2, 2))),
    ],
)
def test_values_returned(value: Any, dtype: DType | None, dims: Any, array: np.ndarray) -> None:
    created = to_array(value, Output("o", dtype, dims), batched=False)
    assert created.dtype == array.dtype and created.shape == array.shape and created.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("value", "dtype", "dims", "text"),
    [
        (None, FP32, (1,), "end it with a return"),
        (1.5, INT64, (1,), "predict returned float64 for output 'o', which is INT64"),
        (np.ones((2, 2)), FP32, (-1,), r"returned shape \[2, 2\] for output 'o', which has \[-1\]"),
        ([[1], [1, 2]], FP32, (-1, -1), "rows of different lengths"),
        ([1, 2], BYTES, (-1,), "use bytes or text"),
        (2**70, INT64, (1,), "convert it"),
    ],
)
def test_values_that_do_not_fit(value: Any, dtype: DType, dims: Any, text: str) -> None:
    with pytest.raises(TritonModelException, match=text):
        to_array(value, Output("o", dtype, dims), batched=False)


def test_return_values_are_assigned_to_outputs_by_name_or_position() -> None:
    outputs = [Output("a", None, ()), Output("b", None, ())]
    for returned in ({"b": 2, "a": 1}, (1, 2), NamedTuple("N", [("x", int), ("y", int)])(1, 2)):
        assert [(output.name, value) for output, value in to_outputs(returned, outputs)] == [("a", 1), ("b", 2)]
    assert to_outputs((1, 2), outputs[:1])[0][1] == (1, 2)
    for returned, text in (
        ((1,), "return 2"),
        (1, "return a dict or a tuple"),
        ({"a": 1}, "no 'b'"),
        ({"c": 1}, "'c'"),
    ):
        with pytest.raises(TritonModelException, match=text):
            to_outputs(returned, outputs)
