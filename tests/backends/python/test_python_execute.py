# SPDX-License-Identifier: Apache-2.0
"""Requests through a model's process and back: tensors, errors, parameters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from backends.python.harness import ECHO, BackendFixture, python_backend, tensor

from headrace.core.dtypes import BF16, BYTES, DTYPES
from headrace.core.errors import (
    AlreadyExists,
    Cancelled,
    FailedPrecondition,
    HeadraceError,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[BackendFixture]:
    with python_backend(tmp_path) as backend:
        yield backend


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with python_backend(tmp_path_factory.mktemp("echo")) as backend:
        yield backend.open(ECHO)


def sample(name: str, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    dtype = DTYPES[name]
    if name == "BYTES":
        elements = np.empty(count, dtype=object)
        elements[:] = [b"\x00x" * (index % 7) for index in range(count)]
        return elements.reshape(shape)
    return (np.arange(count) % 2 if name == "BOOL" else np.arange(count) % 100).astype(dtype.numpy).reshape(shape)


@pytest.mark.parametrize("shape", [(1,), (), (2, 3), (0, 4), (40, 1000)], ids=str)
@pytest.mark.parametrize("name", [name for name in DTYPES if name != "BF16"])
def test_every_type_is_returned_unchanged(echo: object, name: str, shape: tuple[int, ...]) -> None:
    array = sample(name, shape)
    (out,) = echo.one(tensor("IN", array, DTYPES[name])).replies[0][0]
    assert out.dtype is DTYPES[name]
    assert out.array.shape == shape
    assert out.array.tolist() == array.tolist()


def test_a_batch_is_one_call_and_keeps_its_order(backend: BackendFixture) -> None:
    opened = backend.open("""
        import numpy as np, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                n = np.array([len(requests)])
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy()),
                                                    pb_utils.Tensor("N", n)]) for r in requests]
    """)
    works = opened.infer(*([tensor("IN", np.full((size,), size))] for size in (3, 5000, 1, 9000)))
    assert [work.arrays()["OUT"].tolist() for work in works] == [[3] * 3, [5000] * 5000, [1], [9000] * 9000]
    assert [work.arrays()["N"].tolist() for work in works] == [[4]] * 4
    assert opened.finished == 1


def test_only_wanted_outputs_are_sent(backend: BackendFixture) -> None:
    opened = backend.open("""
        import numpy as np, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                return [pb_utils.InferenceResponse([pb_utils.Tensor(n, np.array([1])) for n in "AB"])
                        for r in requests]
    """)
    assert list(opened.one(tensor("IN", [1]), outputs=["B"]).arrays()) == ["B"]
    assert list(opened.one(tensor("IN", [1])).arrays()) == ["A", "B"]


def test_outputs_may_be_views_of_inputs_and_inputs_may_be_kept(backend: BackendFixture) -> None:
    opened = backend.open("""
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            kept = None
            def execute(self, requests):
                array = requests[0].inputs()[0].as_numpy()
                first, self.kept = self.kept if self.kept is not None else array, array
                array[0] += 1
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OLD", first), pb_utils.Tensor("OUT", array[::-1])])]
    """)
    size = 100_000
    opened.one(tensor("IN", np.full(size, 7)))
    for turn in range(3):
        arrays = opened.one(tensor("IN", np.full(size, turn))).arrays()
        expected = 7 if turn == 0 else turn - 1
        assert arrays["OLD"][1:].tolist() == [expected] * (size - 1)
        assert arrays["OUT"][-1] == turn + 1


def test_a_request_exposes_all_its_fields(backend: BackendFixture) -> None:
    opened = backend.open("""
        import json, numpy as np, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def initialize(self, args):
                self.args = args
            def execute(self, requests):
                r = requests[0]
                seen = [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), json.loads(r.parameters()),
                        r.requested_output_names(), r.model_name(), r.is_cancelled(), r.trace().get_context(),
                        [(t.name(), t.shape(), t.triton_dtype(), t.is_cpu()) for t in r.inputs()], self.args]
                out = pb_utils.Tensor("OUT", np.array([json.dumps(seen)], dtype=object))
                return [pb_utils.InferenceResponse([out], parameters={"a": 1, "b": "two", "c": True})]
    """)
    work = opened.one(
        tensor("IN", np.zeros((2, 3), np.float32)),
        sequence_id=42,
        sequence_start=True,
        timeout=5000,
        priority=1,
        mine=1.5,
    )
    *seen, args = json.loads(work.arrays()["OUT"][0])
    assert seen == ["id-1", 42, 1, 5000, {"mine": 1.5}, ["OUT"], "m", False, None, [["IN", [2, 3], 11, True]]]
    assert work.replies[0][2] == {"a": 1, "b": "two", "c": True}
    assert json.loads(args.pop("model_config"))["name"] == "m"
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0_cpu",
        "model_instance_device_id": "0",
        "model_repository": str(backend.folder / "m"),
        "model_version": "1",
        "model_name": "m",
    }


FAULTY = """
    import numpy as np, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            mode = requests[0].inputs()[0].as_numpy()[0].decode()
            good = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([1]))])
            if mode == "raise":
                return self.helper()
            if mode == "model exception":
                raise pb_utils.TritonModelException("my own words")
            if mode == "count":
                return [good]
            if mode == "type":
                return [good, "text"]
            if mode == "no list":
                return good
            if mode == "second":
                error = pb_utils.TritonError("second is bad", pb_utils.TritonError.INVALID_ARG)
                return [good, pb_utils.InferenceResponse(error=error)]
            if mode == "dropped":
                return [good, None]
            if mode == "twice":
                requests[0].get_response_sender().send(good, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return [good, good]
        def helper(self):
            raise TypeError("that was no number")
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with python_backend(tmp_path_factory.mktemp("faulty")) as backend:
        yield backend.open(FAULTY)


def both(faulty: object, mode: str) -> list:
    inputs = [tensor("IN", np.array([mode.encode()], dtype=object))]
    return faulty.infer(inputs, inputs)


def test_an_exception_fails_the_batch_in_tritons_words(faulty: object) -> None:
    for work in both(faulty, "raise"):
        assert isinstance(work.error, Internal)
        text = work.error.message
        assert text.startswith(
            "Failed to process the request(s) for model instance 'm_0_cpu', message: TypeError: that was"
        )
        assert text.endswith(" (m/1/model.py:26)") and "\n" not in text


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("model exception", "my own words"),
        ("count", "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:1"),
        (
            "type",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'str'>'",
        ),
        ("no list", "Expected a list in the execute return, found type"),
    ],
)
def test_wrong_returns_fail_the_batch(faulty: object, mode: str, text: str) -> None:
    for work in both(faulty, mode):
        assert isinstance(work.error, Internal)
        assert text in work.error.message


def test_one_bad_response_fails_one_request(faulty: object) -> None:
    good, bad = both(faulty, "second")
    assert good.arrays()["OUT"] == [1]
    assert isinstance(bad.error, InvalidArgument)
    assert bad.error.message == "second is bad"


def test_an_unanswered_request_fails(faulty: object) -> None:
    good, bad = both(faulty, "dropped")
    assert good.arrays()["OUT"] == [1]
    assert "without a response" in bad.error.message


def test_a_second_answer_is_refused(faulty: object) -> None:
    first, second = both(faulty, "twice")
    assert len(first.replies) == 1
    assert first.arrays()["OUT"] == [1]
    assert "cannot send more than one response" in second.error.message


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("UNKNOWN", Internal),
        ("INTERNAL", Internal),
        ("NOT_FOUND", NotFound),
        ("INVALID_ARG", InvalidArgument),
        ("UNAVAILABLE", Unavailable),
        ("UNSUPPORTED", Unimplemented),
        ("ALREADY_EXISTS", AlreadyExists),
        ("CANCELLED", Cancelled),
    ],
)
def test_every_code_has_its_error(codes: object, code: str, kind: type[HeadraceError]) -> None:
    work = codes.one(tensor("IN", np.array([code.encode()], dtype=object)))
    assert type(work.error) is kind
    assert work.error.message == "x"


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with python_backend(tmp_path_factory.mktemp("codes")) as backend:
        yield backend.open("""
            import triton_python_backend_utils as pb_utils
            class TritonPythonModel:
                def execute(self, requests):
                    code = getattr(pb_utils.TritonError, requests[0].inputs()[0].as_numpy()[0].decode())
                    error = pb_utils.TritonError("x", code)
                    assert error.code() == code and str(error) == "x"
                    return [pb_utils.InferenceResponse(output_tensors=[], error=error)]
        """)


DLPACK = """
    import numpy as np, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            given = requests[0].inputs()[0]
            refused = ""
            try:
                given.as_numpy()
            except pb_utils.TritonModelException as error:
                refused = str(error)
            again = pb_utils.Tensor.from_dlpack("OUT", given.to_dlpack())
            once_more = pb_utils.Tensor.from_dlpack("OUT", again)
            assert once_more.__dlpack_device__() == (1, 0)
            if not refused:
                assert np.shares_memory(np.from_dlpack(given), given.as_numpy())
            return [pb_utils.InferenceResponse([once_more, pb_utils.Tensor("R", np.array([refused], dtype=object))])]
"""


def test_dlpack_both_ways_and_bf16_through_it(backend: BackendFixture) -> None:
    opened = backend.open(DLPACK)
    work = opened.one(tensor("IN", np.arange(6, dtype=np.float32).reshape(2, 3)))
    assert work.arrays()["OUT"].tolist() == [[0, 1, 2], [3, 4, 5]]
    bits = np.arange(10_000, dtype=np.uint16)
    work = opened.one(tensor("IN", bits, BF16))
    out, refused = work.replies[0][0]
    assert out.dtype is BF16
    assert out.array.tolist() == bits.tolist()
    assert "to_dlpack" in refused.array[0].decode()


def test_tensors_of_other_devices_are_copied_when_sent(backend: BackendFixture) -> None:
    opened = backend.open("""
        import numpy as np, triton_python_backend_utils as pb_utils
        class FakeDeviceTensor:
            shape = (2, 2)
            def __dlpack_device__(self): return (2, 0)
            def __dlpack__(self): return "capsule"
            def cpu(self): return np.arange(4, dtype=np.float32).reshape(2, 2)
        class TritonPythonModel:
            def execute(self, requests):
                tensor = pb_utils.Tensor.from_dlpack("OUT", FakeDeviceTensor())
                told = [str(tensor.is_cpu()), str(tensor.__dlpack_device__()), str(tensor.shape()), tensor.to_dlpack()]
                for wrong in (tensor.as_numpy, lambda: pb_utils.Tensor.from_dlpack("X", np.ones((2, 3)).T)):
                    try:
                        wrong()
                    except pb_utils.TritonModelException as error:
                        told.append(str(error)[:26])
                return [pb_utils.InferenceResponse([tensor, pb_utils.Tensor("TOLD", np.array(told, dtype=object))])]
    """)
    arrays = opened.one(tensor("IN", [1])).arrays()
    assert arrays["OUT"].tolist() == [[0, 1], [2, 3]]
    words = [b"False", b"(2, 0)", b"[2, 2]", b"capsule", b"Tensor is stored in GPU an", b"DLPack tensor is not conti"]
    assert arrays["TOLD"].tolist() == words


def test_a_request_that_cannot_be_packed_harms_no_other(echo: object, caplog: pytest.LogCaptureFixture) -> None:
    good = tensor("IN", [1, 2])
    bad, fine = echo.infer([tensor("X", [9]), tensor("IN", np.array([5], dtype=object), BYTES)], [good])
    assert isinstance(bad.error, Internal)
    assert fine.arrays()["OUT"].tolist() == [1, 2]
    (alone,) = echo.infer([tensor("IN", np.array([5], dtype=object), BYTES)])
    assert isinstance(alone.error, Internal)
    assert "could not send a request" in caplog.text


def test_an_output_that_cannot_be_packed_fails_the_batch(backend: BackendFixture) -> None:
    opened = backend.open("""
        import numpy as np, triton_python_backend_utils as pb_utils
        class FakeDeviceTensor:
            def __dlpack_device__(self): return (2, 0)
            def __dlpack__(self): pass
        class TritonPythonModel:
            def execute(self, requests):
                tensors = [pb_utils.Tensor("OUT", np.ones(5000)), pb_utils.Tensor.from_dlpack("OUT", FakeDeviceTensor())]
                return [pb_utils.InferenceResponse([tensor]) for tensor in tensors]
    """)
    for work in opened.infer([tensor("IN", [1])], [tensor("IN", [1])]):
        assert "copy it to the CPU first" in work.error.message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            (
                "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no weights here')\n"
                "    def execute(self, requests): pass"
            ),
            ["failed to initialize model 'm'", "ValueError: no weights here", "(m/1/model.py:3)"],
        ),
        ("import not_there_at_all", ["failed to load model 'm'", "ModuleNotFoundError", "(m/1/model.py:1)"]),
        ("x = 1\ndef broken(:\n", ["SyntaxError", "(m/1/model.py:2)"]),
        ("x = 1", ["has no class TritonPythonModel"]),
        ("class TritonPythonModel: pass", ["does not implement `execute` method"]),
        (
            (
                "import os\nclass TritonPythonModel:\n    def initialize(self, args): os._exit(3)\n"
                "    def execute(self, requests): pass"
            ),
            ["died while it was initialised (exit code 3)"],
        ),
    ],
    ids=["initialize", "import", "syntax", "class", "execute", "exit"],
)
def test_a_model_that_does_not_start_says_why(backend: BackendFixture, source: str, words: list[str]) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        backend.open(source)
    for word in words:
        assert word in caught.value.message


def test_initialize_has_limited_time(backend: BackendFixture) -> None:
    source = """
        import time
        class TritonPythonModel:
            def initialize(self, args): time.sleep(100)
            def execute(self, requests): pass
    """
    with pytest.raises(FailedPrecondition, match="INIT_TIMEOUT_SECONDS"):
        backend.open(source, parameters={"INIT_TIMEOUT_SECONDS": "0.5"})


def test_a_missing_file_and_a_packed_environment_are_refused(backend: BackendFixture) -> None:
    with pytest.raises(NotFound, match=r"other\.py"):
        backend.open(ECHO, default_model_filename="other.py")
    (backend.folder / "env.tar.gz").write_bytes(b"")
    with pytest.raises(Unimplemented, match="EXECUTION_ENV_PATH"):
        backend.open(ECHO, parameters={"EXECUTION_ENV_PATH": str(backend.folder / "env.tar.gz")})
    with pytest.raises(FailedPrecondition, match="bin/python"):
        backend.open(ECHO, parameters={"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env"})


def test_its_own_environment_and_files_beside_the_model(backend: BackendFixture) -> None:
    env = backend.folder / "m" / "env" / "bin"
    env.mkdir(parents=True)
    (env / "python").write_text(f'#!/bin/sh\nMY_ENV=yes exec {sys.executable} "$@"\n')
    (env / "python").chmod(0o755)
    (backend.folder / "m" / "1").mkdir()
    (backend.folder / "m" / "1" / "helper.py").write_text("WORD = b'helped'")
    opened = backend.open(
        """
        import os, numpy as np, triton_python_backend_utils as pb_utils
        import helper
        from .helper import WORD
        class TritonPythonModel:
            def execute(self, requests):
                words = [WORD, helper.WORD, os.environ["MY_ENV"], pb_utils.get_model_dir(), __name__]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(words, dtype=object))])]
        """,
        parameters={"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env"},
    )
    folder = str(backend.folder / "m" / "1").encode()
    assert opened.one(tensor("IN", [1])).arrays()["OUT"].tolist() == [b"helped", b"helped", b"yes", folder, b"model"]
