# SPDX-License-Identifier: Apache-2.0
"""Answers that come later or several times, coroutines, and what a model asks of the server."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends.python.harness import WAIT, BackendFixture, FakeWork, python_backend, tensor

from headrace.core.errors import FailedPrecondition, Internal, Unimplemented
from headrace.core.requests import InferRequest
from headrace.core.telemetry.exposition import render


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[BackendFixture]:
    with python_backend(tmp_path) as backend:
        yield backend


REPEAT = """
    import threading, numpy as np, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            self.threads = []
        def execute(self, requests):
            for request in requests:
                count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
                if count == -1:
                    raise ValueError("minus one")
                if count == -2:
                    return [None]
                if count == -3:
                    continue
                thread = threading.Thread(target=self.answer, args=(request.get_response_sender(), count))
                self.threads.append(thread)
                thread.start()
            return None
        def answer(self, sender, count):
            for index in range(count):
                out = np.full(20_000 if index % 2 else 1, index)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            try:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_info(str(error))
        def finalize(self):
            for thread in self.threads:
                thread.join()
"""


def test_a_decoupled_model_answers_often_or_never(backend: BackendFixture, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.model.m")
    opened = backend.open(REPEAT, decoupled=True)
    many, none, few = opened.infer(*([tensor("IN", [count])] for count in (50, 0, 3)))
    assert [reply[1] for reply in many.replies] == [False] * 50 + [True]
    assert [many.arrays(index)["OUT"][0] for index in range(50)] == list(range(50))
    assert many.replies[-1][0] is None
    assert [reply[:2] for reply in none.replies] == [(None, True)]
    assert len(few.replies) == 4
    opened.close()
    assert sum("Response sender has been closed" in record.getMessage() for record in caplog.records) == 3


@pytest.mark.parametrize(("count", "text"), [(-1, "ValueError: minus one"), (-2, "execute function must return None")])
def test_a_decoupled_model_that_fails(backend: BackendFixture, count: int, text: str) -> None:
    work = backend.open(REPEAT, decoupled=True).one(tensor("IN", [count]))
    assert isinstance(work.error, Internal)
    assert text in work.error.message


def test_a_decoupled_model_that_forgets_a_request_has_answered_it(backend: BackendFixture) -> None:
    work = backend.open(REPEAT, decoupled=True).one(tensor("IN", [-3]))
    assert [reply[:2] for reply in work.replies] == [(None, True)]


def test_a_sender_answers_after_execute_returned(backend: BackendFixture) -> None:
    opened = backend.open("""
        import threading, numpy as np, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            waiting = None
            def execute(self, requests):
                if self.waiting is None:
                    self.waiting = requests[0].get_response_sender()
                    return [None]
                good = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([5]))])
                self.waiting.send(good)
                self.waiting.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return [good]
    """)
    (first,) = opened.submit([tensor("IN", [1])])
    opened.finished_events.get(timeout=WAIT)
    assert not first.replies
    opened.one(tensor("IN", [1]))
    assert first.over.wait(WAIT)
    assert [(reply[0][0].array.tolist(), reply[1]) for reply in first.replies] == [([5], True)]


def test_cancelling_reaches_the_model(backend: BackendFixture) -> None:
    opened = backend.open(
        """
        import time, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                sender.send(pb_utils.InferenceResponse([]))
                while not (requests[0].is_cancelled() and sender.is_cancelled()):
                    time.sleep(0.005)
                error = pb_utils.TritonError("stopped", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
        decoupled=True,
    )
    (work,) = opened.submit([tensor("IN", [1])])
    work.news.get(timeout=WAIT)
    work.cancelled = True
    assert work.over.wait(WAIT)
    assert work.error.message == "stopped"


def test_a_coroutine_executes_and_awaits_other_models(backend: BackendFixture) -> None:
    opened = backend.open("""
        import asyncio, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            async def execute(self, requests):
                calls = [pb_utils.InferenceRequest(model_name="echo", requested_output_names=["OUT"],
                            inputs=[pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() + n)]).async_exec()
                         for r in requests for n in range(20)]
                answers = await asyncio.gather(*calls)
                out = sum(pb_utils.get_output_tensor_by_name(a, "OUT").as_numpy() for a in answers)
                if out[0] < 0:
                    raise ValueError("below zero")
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]) for r in requests]
    """)
    for size in (1, 30_000):
        assert opened.one(tensor("IN", np.full(size, 2))).arrays()["OUT"].tolist() == [230] * size
    assert "ValueError: below zero" in opened.one(tensor("IN", [-100])).error.message


def test_decoupled_coroutines_run_side_by_side(backend: BackendFixture) -> None:
    opened = backend.open(
        """
        import asyncio, numpy as np, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            met = None
            async def execute(self, requests):
                value = int(requests[0].inputs()[0].as_numpy()[0])
                if value < 0:
                    raise ValueError("below zero")
                self.met = self.met or asyncio.Event()
                if value == 2:
                    self.met.set()
                await self.met.wait()
                for request in requests:
                    request.get_response_sender().send(
                        pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value]))]),
                        flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
        decoupled=True,
    )
    (first,) = opened.submit([tensor("IN", [1])])
    opened.finished_events.get(timeout=WAIT)
    assert opened.one(tensor("IN", [2])).arrays()["OUT"] == [2]
    assert first.over.wait(WAIT)
    assert first.arrays()["OUT"] == [1]
    assert "below zero" in opened.one(tensor("IN", [-1])).error.message


CALLER = """
    import asyncio, json, numpy as np, threading, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            name = requests[0].inputs()[0].as_numpy()[0].decode()
            out = getattr(self, name)()
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([json.dumps(out)], dtype=object))])]
        def request(self, model, **more):
            tensors = [pb_utils.Tensor("OUT", np.arange(50_000)), pb_utils.Tensor("TEXT", np.array(["t"], dtype=object))]
            return pb_utils.InferenceRequest(
                model_name=model, requested_output_names=["OUT"], inputs=tensors, **more)
        def echo(self):
            answer = self.request("echo", request_id="r", correlation_id=7, flags=3, timeout=9,
                                  parameters={"p": 1}).exec()
            out = pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy()
            return [answer.has_error(), int(out.sum()), json.loads(answer.parameters())]
        def failure(self):
            answer = self.request("nobody").exec()
            return [answer.has_error(), answer.error().message(), answer.error().code().name]
        def stream(self):
            answers = [a for a in self.request("stream").exec(decoupled=True)]
            assert answers.pop().output_tensors() == []
            async def later():
                answers = await self.request("stream").async_exec(decoupled=True)
                return [int(a.output_tensors()[0].as_numpy()[0]) for a in answers if a.output_tensors()]
            return [[int(a.output_tensors()[0].as_numpy()[0]) for a in answers], asyncio.run(later())]
        def stream_once(self):
            answer = self.request("stream").exec()
            return [answer.has_error(), answer.error().message()]
        def gather(self):
            async def main():
                return await asyncio.gather(*(self.request("echo").async_exec() for _ in range(10)))
            return len(asyncio.run(main()))
        def threads(self):
            done = []
            one = lambda: done.append(self.request("echo").exec().has_error())
            threads = [threading.Thread(target=one) for _ in range(8)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            return done
        def cancel(self):
            answers = self.request("hang").exec(decoupled=True)
            answers.cancel()
            return [len(answer.output_tensors()) for answer in answers]
        def models(self):
            pb_utils.load_model("other", config="{}", files={"file:1/model.py": b"abc", "file:x": b""})
            pb_utils.unload_model("other")
            try:
                pb_utils.load_model(model_name="bad")
            except pb_utils.TritonModelException as error:
                refused = str(error)
            return [pb_utils.is_model_ready("echo"), pb_utils.is_model_ready("other", "1"), refused]
        def misuse(self):
            told = []
            for wrong in (lambda: self.request("echo").get_response_sender(),
                          lambda: pb_utils.InferenceRequest(model_name="x", inputs=[1], requested_output_names=[]),
                          lambda: pb_utils.InferenceRequest(model_name="x", inputs=[]),
                          lambda: pb_utils.InferenceResponse(parameters={1: "x"}),
                          lambda: pb_utils.InferenceResponse(parameters={"x": 0.5}),
                          lambda: pb_utils.Tensor("", np.array([1])),
                          lambda: pb_utils.Tensor("x", np.array(["text"])),
                          lambda: pb_utils.InferenceResponse(error="text"),
                          lambda: self.request("echo").async_exec()):
                try:
                    wrong()
                except Exception as error:
                    told.append(type(error).__name__)
            return told
"""


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with python_backend(tmp_path_factory.mktemp("caller")) as backend:
        yield backend.open(CALLER)


def ask_model(caller: Any, name: str) -> Any:
    work: FakeWork = caller.one(tensor("IN", np.array([name.encode()], dtype=object)))
    return json.loads(work.arrays()["OUT"][0])


def test_calling_another_model(caller: Any) -> None:
    assert ask_model(caller, "echo") == [False, sum(range(50_000)), {"seen": True}]
    request = caller.backend.services.requests[-1]
    assert (request.model_name, request.model_version, request.id) == ("echo", "", "r")
    assert [output.name for output in request.outputs] == ["OUT"]
    assert request.parameters == {
        "p": 1,
        "sequence_id": 7,
        "sequence_start": True,
        "sequence_end": True,
        "timeout": 9,
    }
    assert request.inputs[1].array.tolist() == [b"t"]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("failure", [True, "model 'nobody' is not known", "NOT_FOUND"]),
        ("stream", [[0, 1, 2], [0, 1, 2]]),
        ("gather", 10),
        ("threads", [False] * 8),
        ("models", [True, False, "no model 'bad' in the repository"]),
        (
            "misuse",
            ["TritonModelException", "TypeError", "TypeError"]
            + ["TritonModelException"] * 4
            + ["TypeError", "RuntimeError"],
        ),
    ],
)
def test_calls(caller: Any, name: str, answer: Any) -> None:
    assert ask_model(caller, name) == answer


def test_a_stream_is_not_a_single_answer(caller: Any) -> None:
    failed, text = ask_model(caller, "stream_once")
    assert failed
    assert "decoupled=True" in text


def test_a_call_can_be_cancelled(caller: Any) -> None:
    before = caller.backend.services.cancelled
    assert ask_model(caller, "cancel") == [0]
    assert caller.backend.services.cancelled == before + 1


def test_files_reach_the_server(caller: Any) -> None:
    ask_model(caller, "models")
    assert ("other", "{}", {"file:1/model.py": b"abc", "file:x": b""}) in caller.backend.services.loaded


MEASURING = """
    import numpy as np, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            kinds = pb_utils.MetricFamily
            self.family = kinds("requests_latency", "Time.", pb_utils.MetricFamily.COUNTER)
            self.counter = self.family.Metric(labels={"model": "m"})
            self.gauge = kinds(name="depth", description="Depth.", kind=kinds.GAUGE).Metric()
            self.histogram = kinds("sizes", "Sizes.", kinds.HISTOGRAM).Metric(buckets=[1, 10])
        def execute(self, requests):
            logger = pb_utils.Logger
            logger.log_info("info"); logger.log_warn("warn"); logger.log_error("error"); logger.log_verbose("verbose")
            logger.log("plain"); logger.log("by level", logger.WARNING); logger.log("nested", logger.LogLevel.ERROR)
            self.counter.increment(2.5)
            self.gauge.set(4); self.gauge.increment(-1)
            self.histogram.observe(5)
            refused = 0
            for wrong in (lambda: self.counter.increment(-1), lambda: self.counter.set(1), lambda: self.gauge.observe(1),
                          lambda: self.histogram.value(), lambda: self.family.Metric(labels={"other": "x"}),
                          lambda: pb_utils.MetricFamily("depth", "Depth.", pb_utils.MetricFamily.COUNTER)):
                try:
                    wrong()
                except pb_utils.TritonModelException:
                    refused += 1
            out = np.array([self.counter.value(), self.gauge.value(), refused])
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])]
"""


def test_metrics_and_log_lines_reach_the_server(backend: BackendFixture, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "headrace.model.m")
    first, second = backend.open(MEASURING), backend.open(MEASURING)
    assert first.one(tensor("IN", [1])).arrays()["OUT"].tolist() == [2.5, 3, 6]
    assert second.one(tensor("IN", [1])).arrays()["OUT"].tolist() == [5, 3, 6]
    text = render(backend.services.metrics).decode()
    assert 'requests_latency{model="m"} 5' in text
    assert 'sizes_bucket{le="10"} 2' in text.replace("10.0", "10")
    lines = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "headrace.model.m"]
    assert lines[:7] == [
        ("INFO", "info"),
        ("WARNING", "warn"),
        ("ERROR", "error"),
        ("DEBUG", "verbose"),
        ("INFO", "plain"),
        ("WARNING", "by level"),
        ("ERROR", "nested"),
    ]


def test_a_bad_metric_name_fails_initialize_with_the_reason(backend: BackendFixture) -> None:
    with pytest.raises(FailedPrecondition, match="is not allowed"):
        backend.open("""
            import triton_python_backend_utils as pb_utils
            class TritonPythonModel:
                def initialize(self, args):
                    pb_utils.MetricFamily("no good", "x", pb_utils.MetricFamily.COUNTER).Metric(labels={})
                def execute(self, requests): pass
        """)


AGAIN = """
    import numpy as np, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            self.turns, self.sizes = {}, []
        def execute(self, requests):
            self.sizes.append(len(requests))
            answers = []
            for request in requests:
                key = request.request_id()
                self.turns[key] = self.turns.get(key, 0) + 1
                if self.turns[key] < 3:
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                    answers.append(None)
                else:
                    out = pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())
                    answers.append(pb_utils.InferenceResponse([out, pb_utils.Tensor("S", np.array(self.sizes))]))
            return answers
"""


@pytest.mark.parametrize(("max_batch_size", "sizes"), [(0, 1), (8, 2)])
def test_a_rescheduled_request_is_executed_again(backend: BackendFixture, max_batch_size: int, sizes: int) -> None:
    opened = backend.open(AGAIN, max_batch_size=max_batch_size)
    requests = [InferRequest("m", [tensor("IN", [[size] * 3000])], id=str(size)) for size in (1, 2)]
    works = opened.infer(*requests) if max_batch_size else [*opened.infer(requests[0]), *opened.infer(requests[1])]
    assert [work.arrays()["OUT"].tolist() for work in works] == [[[1] * 3000], [[2] * 3000]]
    assert set(works[-1].arrays()["S"].tolist()) == {sizes}


def test_unsupported_flags_are_refused(backend: BackendFixture) -> None:
    opened = backend.open("""
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                try:
                    requests[0].set_release_flags(7)
                except pb_utils.TritonModelException as error:
                    told = pb_utils.TritonError(str(error), pb_utils.TritonError.UNSUPPORTED)
                    return [pb_utils.InferenceResponse(error=told)]
    """)
    work = opened.one(tensor("IN", [1]))
    assert isinstance(work.error, Unimplemented)
    assert "flag 7" in work.error.message


def test_a_rescheduled_request_keeps_its_sender(backend: BackendFixture) -> None:
    opened = backend.open(
        """
        import threading, numpy as np, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            turn = 0
            again = threading.Event()
            def execute(self, requests):
                self.turn += 1
                request = requests[0]
                if self.turn == 1:
                    threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                elif self.turn == 2:
                    self.again.set()
            def answer(self, sender):
                self.again.wait()
                for value in range(3):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value]))]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
        decoupled=True,
    )
    work = opened.one(tensor("IN", [1]))
    assert [work.arrays(index)["OUT"].tolist() for index in range(3)] == [[0], [1], [2]]
    assert work.replies[3][:2] == (None, True)


COUNTDOWN = """
    import numpy as np, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        left = None
        def execute(self, requests):
            for request in requests:
                if self.left is None:
                    self.left = int(request.inputs()[0].as_numpy()[0])
                self.left -= 1
                sender = request.get_response_sender()
                response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([self.left]))])
                if self.left <= 0:
                    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                else:
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                    sender.send(response)
            return None
"""


def test_one_response_for_each_turn(backend: BackendFixture) -> None:
    work = backend.open(COUNTDOWN, decoupled=True, max_batch_size=4).one(tensor("IN", [4]))
    assert [(reply[0][0].array.tolist(), reply[1]) for reply in work.replies] == [
        ([3], False),
        ([2], False),
        ([1], False),
        ([0], True),
    ]


LIVES = """
    import numpy as np, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            first = pb_utils.MetricFamily("lives", "first words", pb_utils.COUNTER)
            second = pb_utils.MetricFamily("lives", "second words", pb_utils.COUNTER)
            self.kept, self.other = first.Metric({"who": "kept"}), second.Metric({"who": "kept"})
            self.kept.increment(1)
            self.family = first
            pb_utils.MetricFamily("sizes", "x", pb_utils.HISTOGRAM).Metric(labels={}, buckets=[]).observe(3)
        def execute(self, requests):
            short = self.family.Metric({"who": "short"})
            short.increment(5)
            values = [self.other.value(), short.value()]
            self.other = None
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(values))])]
"""


def test_a_metric_lives_as_long_as_it_is_referenced(backend: BackendFixture) -> None:
    opened = backend.open(LIVES)
    assert opened.one(tensor("IN", [1])).arrays()["OUT"].tolist() == [1, 5]
    text = render(backend.services.metrics).decode()
    assert "# HELP lives first words" in text
    assert 'lives{who="kept"} 1' in text
    assert "short" not in text
    opened.close()
    assert "kept" not in render(backend.services.metrics).decode()
