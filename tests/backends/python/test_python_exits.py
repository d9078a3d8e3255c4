# SPDX-License-Identifier: Apache-2.0
"""Models that call sys.exit: an error of the model like any other, told with its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from backends.python.harness import BackendFixture, python_backend, tensor

from headrace.core.errors import FailedPrecondition

EXITS = """
    import os, sys, numpy as np, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            if requests[0].inputs()[0].as_numpy()[0]:
                sys.exit(3)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([os.getpid()]))]) for r in requests]
"""


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[BackendFixture]:
    with python_backend(tmp_path) as backend:
        yield backend


def test_an_exit_in_execute_is_reported_and_the_process_stays(backend: BackendFixture) -> None:
    opened = backend.open(EXITS)
    pid = opened.pid
    message = opened.one(tensor("IN", [1])).error.message
    assert "SystemExit: 3" in message
    assert message.endswith("(m/1/model.py:6)")
    assert opened.one(tensor("IN", [0])).arrays()["OUT"] == [pid]


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("import sys\nsys.exit(3)\n", r"failed to load model 'm': SystemExit: 3 \(m/1/model.py:2\)"),
        (
            "import sys\nclass TritonPythonModel:\n  def initialize(self, args): sys.exit(3)\n  def execute(self, r): 0\n",
            r"failed to initialize model 'm': SystemExit: 3 \(m/1/model.py:3\)",
        ),
    ],
)
def test_an_exit_during_load_is_reported_with_its_position(backend: BackendFixture, source: str, place: str) -> None:
    with pytest.raises(FailedPrecondition, match=place):
        backend.open(source)
