# SPDX-License-Identifier: Apache-2.0
"""The shape of the contract: few methods, every backend with cases, none imported before it is needed, others' too."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from contract_cases import MODULES, cases_of
from contract_serving import Served

from headrace.backends.contract import Backend
from headrace.backends.table import BACKENDS, EXTRAS, INSTALL_HINTS, backend_named
from headrace.core.errors import InvalidArgument
from headrace.models.config.drafts import read_draft
from headrace.models.config.formats import FORMATS

pytestmark = pytest.mark.worker("frameworks")

WITHOUT_CASES = {
    "tensorrt": "needs a GPU: driven through a fake of TensorRT's documented interface by tests/backends/test_tensorrt_*",
    "llm": "answers as a stream: tests/backends/llm, tests/api/openai",
    "openai_proxy": "answers as a stream: tests/backends/openai_proxy",
    "ensemble": "no backend: the engine's own, tested in tests/engine",
}
FRAMEWORKS = [
    *("onnxruntime", "onnx", "torch", "tensorflow", "keras", "xgboost", "lightgbm", "openvino", "skops", "sklearn"),
    *("scipy", "pandas", "tensorrt", "cuda", "jax"),
]


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_protocol_is_small() -> None:
    methods = [name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")]
    assert 1 <= len(methods) <= 5, methods


def test_every_format_has_a_case(tmp_path: Path) -> None:
    """By backend and by file: a backend of two formats has a case for each."""
    seen: set[tuple[str, str]] = set()
    for module in MODULES:
        for case in cases_of(module):
            folder = tmp_path / case.name
            assert not folder.exists(), f"two cases are called {case.name}"
            folder.mkdir()
            case.write(folder)
            files = {path.name for path in (folder / "1").iterdir()}
            backend = read_draft(folder).backend
            named = {read_draft(folder).message.default_model_filename} - {""}
            seen |= {(backend, name) for name in {*files, *named, ""}}
    wanted = {(format_name.backend, format_name.filename) for format_name in FORMATS} | {
        (name, "") for name in BACKENDS
    }
    missing = {(backend, name) for backend, name in wanted - seen if backend not in WITHOUT_CASES}
    assert not missing, f"no case in tests/backends/cases for {sorted(missing)}"


def test_every_backend_has_its_methods_and_says_how_to_install_it() -> None:
    for name in BACKENDS:
        if name in INSTALL_HINTS:
            continue
        with warnings.catch_warnings(action="ignore"):  # of the frameworks, about themselves
            backend = backend_named(name)
        for method in ("complete", "usable_gpus", "load"):
            assert callable(getattr(backend, method)), f"{name} has no {method}"
        assert backend_named(name) is backend
        assert backend.usable_gpus(0) == 0


def test_no_framework_is_imported_before_a_model_needs_it() -> None:
    code = f"""
import sys
import headrace.engine.engine, headrace.engine.repository.check, headrace.programs.serve.server, headrace.cli.main
import headrace.backends.table
print([name for name in {FRAMEWORKS!r} if name in sys.modules])
"""
    assert run_python(code).strip() == "[]"


def test_a_framework_that_is_missing_is_named_with_the_way_to_install_it() -> None:
    code = f"""
import sys
from importlib.abc import MetaPathFinder

class Nothing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {FRAMEWORKS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nothing())
from headrace.backends.table import BACKENDS, backend_named
from headrace.core.errors import FailedPrecondition
for name in BACKENDS:
    try:
        backend_named(name)
        print(f"{{name}}: works")
    except FailedPrecondition as error:
        print(f"{{name}}: {{error.message}}")
"""
    received = dict(line.split(": ", 1) for line in run_python(code).splitlines())
    assert received.keys() == BACKENDS.keys()
    for name, text in received.items():
        if name in INSTALL_HINTS:
            assert "not installed" in text and INSTALL_HINTS[name] in text
        elif name in EXTRAS:
            extra = EXTRAS[name]
            assert text == f"backend '{name}' needs the extra \"{extra}\": pip install 'headrace[{extra}]'"
        else:
            assert text == "works", f"{name}: {text}"


THIRD_PARTY = '''
class DoublingBackend:
    """Written against headrace.backends.contract and nothing else."""

    def complete(self, config, files):
        return None

    def usable_gpus(self, present):
        return 0

    def load(self, config, files, services):
        return self

    def open(self, placement):
        return DoublingInstance()

    def close(self):
        pass


class DoublingInstance:
    def compute(self, inputs, wanted):
        return {"OUT": inputs["IN"] * 2}

    def close(self):
        pass
'''
THIRD_PARTY_CONFIG = """backend: "contract_doubling"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] }
"""


SLOW_TO_MAKE = """
import time


class SlowBackend:
    def __init__(self):
        time.sleep(0.05)
"""


def test_a_backend_requested_by_several_threads_is_created_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_make.py").write_text(SLOW_TO_MAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(BACKENDS, "slow_to_make", "slow_to_make:SlowBackend")
    monkeypatch.setattr("headrace.backends.table._LOADED", {})
    with ThreadPoolExecutor(4) as threads:
        created = list(threads.map(backend_named, ["slow_to_make"] * 4))
    assert len({id(backend) for backend in created}) == 1


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's package, as pip installs it."""
    site = tmp_path / "site"
    info = site / "headrace_doubling-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "headrace_doubling.py").write_text(THIRD_PARTY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-doubling\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[headrace.backends]\n"
        "contract_doubling = headrace_doubling:DoublingBackend\n"
        "identity = headrace_doubling:DoublingBackend\n"
    )
    monkeypatch.syspath_prepend(str(site))
    return site


def test_a_backend_of_others_serves(third_party: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "doubled"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(THIRD_PARTY_CONFIG)
    served = Served(tmp_path / "models")
    try:
        served.load("doubled")
        answer = served.infer("doubled", {"IN": np.array([[1, 2], [3, 4]], np.float32)})
        assert answer["OUT"].tolist() == [[2, 4], [6, 8]]
    finally:
        served.close()


def test_a_backend_of_others_cannot_take_the_name_of_ours(third_party: Path) -> None:
    assert type(backend_named("identity")).__module__ == "headrace.backends.identity"
    with pytest.raises(
        InvalidArgument, match="'no_such' is not known: use one of contract_doubling, huggingface_vision"
    ):
        backend_named("no_such")


def test_tensorrt_is_distinguished_from_an_unknown_backend() -> None:
    # In a process of its own: other tests give this one a fake TensorRT.
    script = (
        "from headrace.backends.table import backend_named\n"
        "try:\n    backend_named('tensorrt')\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    stdout = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert stdout.startswith("FailedPrecondition")
    assert "install TensorRT" in stdout


TWO_AT_ONCE = """
import sys, threading
from headrace.backends.table import backend_named
begin, wrong = threading.Barrier(2), []

def load(name):
    begin.wait()
    try:
        backend_named(name)
    except Exception as error:
        wrong.append(repr(error))

threads = [threading.Thread(target=load, args=(name,)) for name in ("llm", "huggingface_vision")]
for each in threads:
    each.start()
for each in threads:
    each.join()
sys.exit("; ".join(wrong) or 0)
"""


@pytest.mark.slow  # quick: test_a_backend_requested_by_several_threads_is_created_once
def test_two_backends_of_one_package_may_be_imported_together() -> None:
    # transformers imports its parts late, and breaks when two threads begin with it.
    done = subprocess.run([sys.executable, "-c", TWO_AT_ONCE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[-1000:]) == (0, "")
