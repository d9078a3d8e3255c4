# SPDX-License-Identifier: Apache-2.0
"""Tools of the tests of batched jobs: a model, items, and `headrace batch` as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from headrace.jobs.batch.settings import BatchSettings
from support.programs import run

WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
_PROGRAM = "import typer\nfrom headrace.cli.batch import batch\ntyper.run(batch)"


def onnx_model(folder: Path) -> Path:
    """X (4 numbers) times WEIGHTS is Y (3 numbers), for any number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["X", "W"], ["Y"])],
        "product",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(WEIGHTS, "W")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "product.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def row_of(index: int) -> list[float]:
    return [float(index), float(index % 7), -1.0, 0.5]


def manifest(path: Path, count: int) -> Path:
    """A line for each of so many items."""
    path.write_text("".join(json.dumps({"id": f"i{index}", "X": row_of(index)}) + "\n" for index in range(count)))
    return path


def settings_of(model: Path, given: Path, output: Path, **more: Any) -> BatchSettings:
    return BatchSettings(str(model), str(given), str(output), folder=output.parent / "cache", **more)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_products(found: Sequence[dict[str, Any]], count: int) -> None:
    """Every item exactly once, with the right answer and its own id."""
    assert sorted(record["index"] for record in found) == list(range(count))
    for record in found:
        assert record["id"] == f"i{record['index']}"
        wanted = np.asarray(row_of(record["index"]), np.float32) @ WEIGHTS
        np.testing.assert_allclose(record["output"]["outputs"]["Y"], wanted, rtol=1e-4)


def start_batch(*words: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """`headrace batch WORDS` as a process of its own."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", _PROGRAM, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )


def run_command(*words: str | Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """The exit code and what `headrace batch WORDS` printed, inside this process."""
    done = run("batch", *words, env=env)
    return done.returncode, done.stdout, done.stderr
