# SPDX-License-Identifier: Apache-2.0
"""A `model.py` with one function or class and no configuration is served; each source runs in a real child."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends.python.harness import WAIT, BackendFixture, Opened, python_backend, tensor

from headrace.backends.contract import Placement
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument
from headrace.engine.repository.check import check_repository
from headrace.models.config.completion import complete
from headrace.models.config.drafts import read_draft
from headrace.models.config.types import DynamicBatching, ModelConfig
from support.waiting import eventually

HEAD = """
import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, TypedDict
import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
"""


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[BackendFixture]:
    with python_backend(tmp_path) as backend:
        yield backend


def configured(backend: BackendFixture, source: str, config: str = "") -> ModelConfig:
    """The configuration that the source makes of itself, as the engine would have it."""
    files = backend.files(HEAD + textwrap.dedent(source))
    if config:
        (files.model_folder / "config.pbtxt").write_text(config)
    draft = read_draft(files.model_folder)
    return complete(draft, backend.backend.complete(draft.typed(), files))


def served(backend: BackendFixture, source: str, made: ModelConfig | None = None) -> Opened:
    """The source as a model, with the configuration that it makes of itself unless one is given."""
    made = made or configured(backend, source)
    files = backend.files(HEAD + textwrap.dedent(source))
    instance = backend.backend.load(made, files, backend.services).open(Placement("m_0_cpu"))
    opened = Opened(backend, instance)
    backend.opened.append(opened)
    return opened


def text(*elements: str) -> np.ndarray:
    return np.array([element.encode() for element in elements], dtype=object)


def test_one_function_is_a_model(backend: BackendFixture) -> None:
    opened = served(
        backend,
        """
        def predict(x: np.ndarray) -> np.ndarray:
            if x.size == 3:
                raise ValueError("three is not allowed")
            if x.size == 4:
                raise KeyError("four")
            return x * 2 if x.size != 5 else np.arange(5)
        """,
    )
    work = opened.one(tensor("x", np.array([1, 2], np.float32)))
    assert work.arrays()["output"].tolist() == [2, 4]
    wrong = opened.one(tensor("x", np.zeros(3, np.float32))).error
    assert type(wrong) is InvalidArgument and wrong.message == "model 'm' refused the request: three is not allowed"
    fault = opened.one(tensor("x", np.zeros(4, np.float32))).error
    assert (
        type(fault) is Internal and "KeyError: 'four'" in fault.message and fault.message.endswith("(m/1/model.py:13)")
    )
    # An error ends its request only.
    good, bad = opened.infer([tensor("x", np.ones(1, np.float32))], [tensor("x", np.zeros(3, np.float32))])
    assert good.arrays()["output"].tolist() == [2] and isinstance(bad.error, InvalidArgument)
    assert opened.one(tensor("x", np.zeros(5, np.float32))).arrays()["output"].dtype == np.int64


def test_a_function_without_hints_takes_any_type_and_shape(backend: BackendFixture) -> None:
    source = """
        def predict(x):
            if x.dtype == object:
                return ["a", "bc"]
            return x.sum() if x.ndim == 3 else np.zeros(3).reshape(x.size) if x.ndim == 1 else x
        """
    created = configured(backend, source)
    assert [(spec.dtype, spec.dims) for spec in (*created.inputs, *created.outputs)] == [(None, None), (None, None)]
    opened = served(backend, source, created)
    same = opened.one(tensor("x", np.ones((2, 2), np.int16))).arrays()["output"]
    assert same.dtype == np.int16 and same.tolist() == [[1, 1], [1, 1]]
    assert opened.one(tensor("x", np.ones((1, 1, 2), np.float32))).arrays()["output"].tolist() == [2.0]
    assert opened.one(tensor("x", text("one"))).arrays()["output"].tolist() == [b"a", b"bc"]
    # The reason is numpy's, so Python's name for it and the place are told.
    refused = opened.one(tensor("x", np.ones(7))).error.message
    assert refused == (
        "model 'm' refused the request: ValueError: cannot reshape array of size 3 into shape (7,) (m/1/model.py:12)"
    )


def test_a_class_keeps_what_it_made_once(backend: BackendFixture, tmp_path: Path) -> None:
    opened = served(
        backend,
        f"""
        class Out(TypedDict):
            label: str
            rows: Annotated[npt.NDArray[np.int64], (-1, 2)]
        class Counter:
            def __init__(self):
                self.count = 0
            def predict(self, name: str, times: int = 2, tags: list[str] | None = None) -> Out:
                self.count += 1
                return {{"label": f"{{name}} {{times}} {{tags}} {{self.count}}", "rows": np.ones((times, 2), int)}}
            def close(self):
                open({str(tmp_path / "closed")!r}, "w").close()
        """,
    )
    first = opened.one(tensor("name", text("ann"))).arrays()
    assert first["label"].tolist() == [b"ann 2 None 1"] and first["rows"].shape == (2, 2)
    more = [tensor("times", np.array([1])), tensor("tags", text("a", "b")), tensor("name", text("bo"))]
    second = opened.one(*more, outputs=["label"]).arrays()
    assert {name: array.tolist() for name, array in second.items()} == {"label": [b"bo 1 ['a', 'b'] 2"]}
    assert "not UTF-8" in opened.one(tensor("name", np.array([b"\xff"], dtype=object))).error.message
    opened.close()
    assert (tmp_path / "closed").exists()


def test_batches_are_computed_by_one_call_and_a_bad_request_fails_alone(backend: BackendFixture) -> None:
    source = """
        BATCH = 8
        def predict(x: Annotated[npt.NDArray[np.float32], (2,)]) -> npt.NDArray[np.float32]:
            if x.min() < 0:
                raise ValueError("negative")
            return (x + len(x)).sum(axis=1, keepdims=True)
    """
    config = configured(backend, source)
    assert config.max_batch_size == 8 and isinstance(config.scheduling, DynamicBatching)
    assert config.inputs[0].dims == (2,) and config.outputs[0].dims == (-1,)
    opened = served(backend, source, config)
    rows = [[tensor("x", np.ones((count, 2), np.float32))] for count in (1, 2)]
    assert [work.arrays()["output"].tolist() for work in opened.infer(*rows)] == [[[8.0]], [[8.0], [8.0]]]
    good, bad = opened.infer(rows[0], [tensor("x", -np.ones((1, 2), np.float32))])
    assert good.arrays()["output"].tolist() == [[4.0]] and "negative" in bad.error.message


def test_async_functions_compute_side_by_side(backend: BackendFixture) -> None:
    opened = served(
        backend,
        """
        here = asyncio.Event()
        async def predict(x: float) -> float:
            if x == 0:
                await here.wait()
            if x == 2:
                raise RuntimeError("two")
            here.set()
            return x + 1
        """,
    )
    (waiting,) = opened.submit([tensor("x", np.array([0.0]))])
    opened.finished_events.get(timeout=WAIT)
    assert opened.one(tensor("x", np.array([1.0]))).arrays()["output"].tolist() == [2.0]
    assert waiting.over.wait(WAIT) and waiting.arrays()["output"].tolist() == [1.0]
    assert "RuntimeError: two" in opened.one(tensor("x", np.array([2.0]))).error.message


@pytest.mark.parametrize(("word", "hint"), [("def", "Iterator"), ("async def", "AsyncIterator")])
def test_generators_answer_several_times(backend: BackendFixture, word: str, hint: str) -> None:
    source = f"""
        {word} predict(prompt: str, n: int) -> {hint}[str]:
            for i in range(n):
                yield f"{{prompt}}{{i}}"
            if n == 1:
                raise ValueError("only one")
    """
    config = configured(backend, source)
    assert config.decoupled
    opened = served(backend, source, config)
    work = opened.one(tensor("prompt", text("p")), tensor("n", np.array([3])))
    assert [work.arrays(index)["output"].tolist() for index in range(3)] == [[b"p0"], [b"p1"], [b"p2"]]
    assert work.replies[3][:2] == (None, True)
    work = opened.one(tensor("prompt", text("p")), tensor("n", np.array([1])))
    assert work.arrays(0)["output"].tolist() == [b"p0"] and "only one" in work.error.message


@pytest.mark.parametrize(("word", "hint"), [("def", "Iterator"), ("async def", "AsyncIterator")])
def test_a_generator_ends_when_its_output_is_no_longer_wanted(
    backend: BackendFixture, tmp_path: Path, word: str, hint: str
) -> None:
    wait = "await asyncio.sleep(0.001)" if "async" in word else "time.sleep(0.001)"
    opened = served(
        backend,
        f"""
        import time
        {word} predict(n: int) -> {hint}[int]:
            try:
                while True:
                    yield n
                    {wait}
            finally:
                open({str(tmp_path / "ended")!r}, "w").close()
        """,
    )
    (work,) = opened.submit([tensor("n", np.array([3]))])
    assert work.news.get(timeout=WAIT)[1] is False
    work.cancelled = True
    assert work.over.wait(WAIT) and (tmp_path / "ended").exists()


def test_inputs_may_be_written_to_and_rows_may_have_one_value(backend: BackendFixture) -> None:
    opened = served(
        backend,
        """
        BATCH = 4
        def predict(x: Annotated[npt.NDArray[np.float32], (-1,)]) -> npt.NDArray[np.int64]:
            x += 1
            return x.argmax(axis=1) if x.shape[1] > 1 else x.argmax()
        """,
    )
    for size in (3, 100_000):
        (work,) = opened.infer([tensor("x", np.arange(2 * size, dtype=np.float32).reshape(2, size))])
        assert work.arrays()["output"].tolist() == [[size - 1], [size - 1]]
    error = opened.one(tensor("x", np.zeros((2, 1), np.float32))).error
    assert "returned shape [] for output 'output', which has [-1, -1]" in error.message


def test_the_configuration_wins_where_the_hints_are_open(backend: BackendFixture) -> None:
    config = configured(
        backend,
        "def predict(x: np.ndarray) -> np.ndarray: return x",
        """
        max_batch_size: 4
        input { name: "x" data_type: TYPE_INT64 dims: [ 3, 4 ] }
        output { name: "mine" data_type: TYPE_INT64 dims: [ 3, 4 ] }
        """,
    )
    assert [(spec.name, spec.dtype.name, spec.dims) for spec in (*config.inputs, *config.outputs)] == [
        ("x", "INT64", (3, 4)),
        ("mine", "INT64", (3, 4)),
    ]
    assert config.max_batch_size == 4 and isinstance(config.scheduling, DynamicBatching)


@pytest.mark.parametrize(
    ("source", "config", "told"),
    [
        ("x = 1", "", "has no class TritonPythonModel and no predict: write a function"),
        (
            "class A:\n  def predict(self, x): ...\nclass B(A): ...",
            "",
            "several classes with predict, A, B: name the one",
        ),
        (
            "class A:\n  def __init__(self, n): ...\n  def predict(self, x): ...",
            "",
            "cannot be created without arguments",
        ),
        ("BATCH = 'x'\ndef predict(x): ...", "", "BATCH in"),
        ("BATCH = 8\ndef predict(x: float): ...", "", "predict batches, and x cannot have rows"),
        ("BATCH = 8\ndef predict(x):\n  yield x", "", "so it cannot batch: take BATCH out"),
        ("def predict(x) -> dict: ...", "", "write a TypedDict"),
        ("def predict(x): ...", 'input { name: "y" }', "has an input 'y', and predict takes x: rename"),
        (
            "def predict(x: int): ...",
            'input { name: "x" data_type: TYPE_FP32 }',
            "configuration expects datatype TYPE_FP32",
        ),
    ],
)
def test_mistakes_are_reported_before_serving(backend: BackendFixture, source: str, config: str, told: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        configured(backend, source, config)
    assert type(caught.value) is InvalidArgument and told in caught.value.message


def test_a_check_notices_a_model_that_cannot_compute(backend: BackendFixture) -> None:
    tensors = 'input { name: "I" data_type: TYPE_FP32 dims: 1 } output { name: "O" data_type: TYPE_FP32 dims: 1 }'
    for name, source in (("plain", "class TritonPythonModel: pass"), ("none", "x = 1")):
        files = backend.files(source, name)
        (files.model_folder / "config.pbtxt").write_text(f'backend: "python" {tensors}')
    problems = {problem.path: problem.text for problem in check_repository(backend.folder).problems}
    assert "does not implement `execute` method" in problems["plain/1"]
    assert "no predict" in problems["none/1"]


CALLS_ITSELF = """
    {word} predict(x: int) -> int:
        request = pb_utils.InferenceRequest(
            model_name="m", requested_output_names=["output"], inputs=[pb_utils.Tensor("x", np.array([x]))]
        )
        response = {call}
        if response.has_error():
            raise RuntimeError(response.error().message())
        return 1
"""


def test_a_model_that_waits_for_itself_is_refused(backend: BackendFixture) -> None:
    opened = served(backend, CALLS_ITSELF.format(word="def", call="request.exec()"))
    for _ in range(2):
        reported = opened.one(tensor("x", np.array([1]))).error.message
        assert "model 'm' calls itself and waits, but its only instance is the one that calls" in reported
    assert backend.services.requests == []


def test_a_coroutine_awaited_by_execute_is_refused_too(backend: BackendFixture) -> None:
    source = """
        class TritonPythonModel:
            async def execute(self, requests):
                async def ask():
                    return await pb_utils.InferenceRequest(
                        model_name="m", requested_output_names=["OUT"], inputs=requests[0].inputs()
                    ).async_exec()
                response, = await asyncio.gather(ask())
                return [pb_utils.InferenceResponse(error=response.error())]
    """
    opened = backend.open(HEAD + textwrap.dedent(source))
    assert "calls itself and waits" in opened.one(tensor("IN", np.array([1]))).error.message


def test_a_call_that_another_instance_can_answer_succeeds(backend: BackendFixture) -> None:
    source = CALLS_ITSELF.format(word="def", call="request.exec()")
    config = configured(backend, source)
    model = backend.backend.load(config, backend.files(HEAD + textwrap.dedent(source)), backend.services)
    opened = [Opened(backend, model.open(Placement(f"m_{index}_cpu"))) for index in range(2)]
    backend.opened += opened
    requests: list[Any] = []
    backend.services.infer = lambda request, answered: requests.append(answered) or (lambda: None)  # type: ignore[method-assign]
    (first,) = opened[0].submit([tensor("x", np.array([1]))])
    eventually(lambda: requests, message=lambda: first.replies)
    # Now all instances would wait: the last of them is refused, and with the first answer there is room again.
    second = opened[1].one(tensor("x", np.array([1])))
    assert "all 2 instances do so" in second.error.message and len(requests) == 1
    backend.in_loop(lambda: requests[0](FailedPrecondition("enough"), True))
    assert first.over.wait(WAIT) and "enough" in first.error.message
    (third,) = opened[1].submit([tensor("x", np.array([1]))])
    eventually(lambda: len(requests) == 2, message=lambda: third.replies)
    backend.in_loop(lambda: requests[1](FailedPrecondition("enough"), True))
    assert third.over.wait(WAIT)


def test_an_async_function_may_call_itself(backend: BackendFixture) -> None:
    opened = served(backend, CALLS_ITSELF.format(word="async def", call="await request.async_exec()"))
    # The engine of this test knows no model m; what counts is that it is asked.
    assert "model 'm' is not known" in opened.one(tensor("x", np.array([1]))).error.message
